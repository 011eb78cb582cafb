"""Time the attention of one verification step: our two variants, xformers and plain FlashAttention.

One command, a table on stdout and raw JSON: ``python bench/attention.py --out attention.json``.
Shape: Qwen3-8B (32 query heads, 8 KV heads, head size 128), bf16, pages of 16 tokens, random trees.
Times are the median of CUDA-graph replays, per call. Each graph holds several calls that read different
pages, as the layers of a model do, so that a context is not served from the L2 cache.
Plain FlashAttention is the yardstick: causal, over the same number of tokens and the same context.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.records import Record

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

Q_HEADS, KV_HEADS, HEAD, PAGE = 32, 8, 128, 16
GROUP = Q_HEADS // KV_HEADS
BATCHES, CONTEXTS, NODES = (1, 4, 16, 64), (512, 4096, 32768), (16, 64, 128, 256)
METHODS = ("plain_fa", "fa_context", "tree_kernel", "fa_tree", "fused", "xformers")
CALLS = 8  # per graph, over different pages where the cache is large enough


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="bench_attention.json", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seconds", type=float, default=55.0, help="stop starting measurements after this")
    parser.add_argument("--per-cell-ms", type=float, default=40.0, help="GPU time spent per measurement")
    return parser.parse_args()


class Cell:
    """The inputs of one (batch, context, nodes) cell over a shared cache."""

    def __init__(self, cache: torch.Tensor, batch: int, context: int, nodes: int) -> None:
        from attention_cases import pack_rows, random_tree

        n = nodes + 1
        words = -(-n // 32)
        self.batch, self.context, self.n, self.cache = batch, context, n, cache
        self.tokens = batch * n
        # Pages per request, in whole pages; xformers reads the same memory as [requests, padded, ...].
        self.pages = -(-(context + n) // PAGE)
        self.variants = max(1, min(CALLS, cache.shape[0] // (batch * self.pages)))
        g = torch.Generator().manual_seed(n)
        self.visible = random_tree(n, g)
        self.q = torch.randn(self.tokens, Q_HEADS, HEAD, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.lse = torch.zeros(Q_HEADS, self.tokens, device="cuda")
        self.cu_q = torch.arange(0, self.tokens + 1, n, dtype=torch.int32, device="cuda")
        self.ctx = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.seq_lens = self.ctx + n
        self.mask = pack_rows(self.visible, words).repeat(batch, 1, 1).cuda()
        self.tree_len = torch.full((batch,), n, dtype=torch.int32, device="cuda")
        self.tables = []
        for i in range(self.variants):
            first = i * batch * self.pages
            table = torch.arange(first, first + batch * self.pages, dtype=torch.int32, device="cuda")
            self.tables.append(table.view(batch, self.pages))

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [pages, PAGE, kv heads, HEAD]; K and V of a token are neighbours, as in vLLM."""
        return tuple(self.cache.split(HEAD, dim=-1))

    def shared(self, call: int) -> dict:
        return {
            "block_table": self.tables[call % self.variants],
            "cu_q": self.cu_q,
            "ctx": self.ctx,
            "mask": self.mask,
            "tree_len": self.tree_len,
            "max_query_len": self.n,
            "num_reqs": self.batch,
            "scale": HEAD**-0.5,
        }


def flash_call(cell: Cell, causal: bool, num_sms: int) -> Callable[[int], torch.Tensor]:
    """FlashAttention as the backend calls it: schedule made once per step, bounded splits."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    from vllm_ddtree.engine.attention_plan import split_bound

    lens = cell.seq_lens if causal else cell.ctx
    longest = cell.context + cell.n
    splits = 32 if causal else split_bound(cell.batch, cell.n, Q_HEADS, KV_HEADS, num_sms, 32)
    schedule = get_scheduler_metadata(
        batch_size=cell.batch,
        max_seqlen_q=cell.n,
        max_seqlen_k=longest,
        num_heads_q=Q_HEADS,
        num_heads_kv=KV_HEADS,
        headdim=HEAD,
        cache_seqlens=lens,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=cell.cu_q,
        page_size=PAGE,
        causal=causal,
        num_splits=splits,
    )
    k, v = cell.kv()

    def call(i: int) -> torch.Tensor:
        _, lse = flash_attn_varlen_func(
            q=cell.q,
            k=k,
            v=v,
            out=cell.out,
            cu_seqlens_q=cell.cu_q,
            max_seqlen_q=cell.n,
            seqused_k=lens,
            max_seqlen_k=longest,
            softmax_scale=HEAD**-0.5,
            causal=causal,
            block_table=cell.tables[i % cell.variants],
            return_softmax_lse=True,
            scheduler_metadata=schedule,
            fa_version=3,
            num_splits=splits,
        )
        return lse

    return call


def xformers_call(cell: Cell) -> Callable[[int], torch.Tensor]:
    """``xformers.ops.tree_attention`` over dense keys, one tree for the whole batch, no gather counted."""
    from xformers.ops import fmha

    from vllm_ddtree.kernels.xformers_tree import tree_bias, xformers_tree_attention

    b, n, padded = cell.batch, cell.n, cell.pages * PAGE
    prefix = fmha.attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[n] * b, kv_padding=padded, kv_seqlen=[cell.context] * b, device=torch.device("cuda")
    )
    bias = tree_bias(cell.visible.cuda(), torch.bfloat16)
    dense = cell.cache.view(-1, KV_HEADS, 2 * HEAD)
    q = cell.q.view(b, n, Q_HEADS, HEAD)

    def call(i: int) -> torch.Tensor:
        first = (i % cell.variants) * b * padded
        k, v = dense[first : first + b * padded].view(b, padded, KV_HEADS, 2 * HEAD).split(HEAD, dim=-1)
        own = slice(cell.context, cell.context + n)
        return xformers_tree_attention(q, k, v, k[:, own], v[:, own], prefix, bias)

    return call


def make_call(method: str, cell: Cell, num_sms: int) -> Callable[[int], torch.Tensor]:
    from vllm_ddtree.kernels.paged_tree import paged_tree_attention
    from vllm_ddtree.kernels.tree_attention import tree_attention_

    k, v = cell.kv()
    if method == "plain_fa":
        return flash_call(cell, True, num_sms)
    if method == "fa_context":
        return flash_call(cell, False, num_sms)
    if method == "tree_kernel":
        return lambda i: tree_attention_(cell.q, k, v, cell.out, cell.lse, num_sms=num_sms, **cell.shared(i))
    if method == "fa_tree":
        context = flash_call(cell, False, num_sms)
        return lambda i: tree_attention_(
            cell.q, k, v, cell.out, context(i), num_sms=num_sms, **cell.shared(i)
        )
    if method == "fused":
        return lambda i: paged_tree_attention(cell.q, k, v, cell.out, num_sms=num_sms, **cell.shared(i))
    return xformers_call(cell)


def measure(call: Callable[[int], torch.Tensor], budget_ms: float) -> dict:
    """Median and quartiles of one call in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(CALLS):
            call(i)

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    first = min(replay(), replay())
    times = [1000 * replay() / CALLS for _ in range(int(min(50, max(3, budget_ms / max(first, 1e-3)))))]
    quartiles = statistics.quantiles(times, n=4)
    return {"us": statistics.median(times), "q1": quartiles[0], "q3": quartiles[2], "replays": len(times)}


def largest_difference(cell: Cell, methods: list[str], num_sms: int) -> dict[str, float]:
    """Largest absolute difference of each whole variant's output from fa_tree's."""
    outputs = {}
    for method in ("fa_tree", "fused", "xformers"):
        if method in methods:
            out = make_call(method, cell, num_sms)(0)
            outputs[method] = out.reshape(cell.q.shape).float().clone()
    base = outputs.get("fa_tree")
    return {m: (o - base).abs().max().item() for m, o in outputs.items() if base is not None}


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        sys.exit("bench/attention.py needs a CUDA device; found none. Run it on the GPU machine.")
    record = Record(args.out, args)
    began = time.perf_counter()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    pages = max(args.batches) * -(-(max(args.contexts) + max(args.nodes) + 1) // PAGE)
    pages = max(pages, 4096)
    cache = torch.empty(pages, PAGE, KV_HEADS, 2 * HEAD, dtype=torch.bfloat16, device="cuda").normal_()
    rows, dead = [], {}
    # Small cells first: where time runs out, the largest are the ones that are missing.
    cells = [(b, c, n) for c in args.contexts for b in args.batches for n in args.nodes]
    cells.sort(key=lambda x: x[0] * x[1] * (x[2] + 1))
    for batch, context, nodes in cells:
        row = {"batch": batch, "context": context, "nodes": nodes, "methods": {}}
        rows.append(row)
        cell = Cell(cache, batch, context, nodes)
        for method in args.methods:
            if method in dead:
                row["methods"][method] = {"error": dead[method]}
            elif time.perf_counter() - began > args.seconds:
                row["methods"][method] = {"error": "not run: out of time"}
            else:
                try:
                    row["methods"][method] = measure(make_call(method, cell, num_sms), args.per_cell_ms)
                except Exception as error:  # a failed cell stays in the table, with its reason
                    traceback.print_exc(limit=3)
                    dead[method] = f"{type(error).__name__}: {error}"[:300]
                    row["methods"][method] = {"error": dead[method]}
                    torch.cuda.synchronize()
        if (batch, nodes) == (1, 64) and time.perf_counter() - began < args.seconds:
            alive = [m for m in args.methods if m not in dead]
            row["max_abs_difference"] = largest_difference(cell, alive, num_sms)
        print_row(row, args.methods, first=len(rows) == 1)
        del cell
    shape = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_size": HEAD, "page": PAGE, "dtype": "bf16"}
    seconds = time.perf_counter() - began
    record.write(rows, shape=shape, seconds=seconds)
    print(f"wrote {args.out} after {seconds:.0f} s")


def print_row(row: dict, methods: list[str], first: bool) -> None:
    if first:
        print(
            "batch context nodes " + "".join(f"{m:>13}" for m in methods) + "   fa_tree/plain  (us per call)"
        )
    done = row["methods"]
    times = "".join(f"{done[m]['us']:13.1f}" if "us" in done[m] else f"{'-':>13}" for m in methods)
    ratio = ""
    if all("us" in done.get(m, {}) for m in ("fa_tree", "plain_fa")):
        ratio = f"{done['fa_tree']['us'] / done['plain_fa']['us']:.2f}"
    difference = row.get("max_abs_difference", "")
    print(
        f"{row['batch']:5d} {row['context']:7d} {row['nodes']:5d} {times} {ratio:>10} {difference}",
        flush=True,
    )


if __name__ == "__main__":
    main()
