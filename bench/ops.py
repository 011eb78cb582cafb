"""Times every compiled CUDA op and prints a table.

Owns: inputs of realistic shape, one CUDA graph of repeated calls per cell. A cell that fails
keeps its error in the results. Two times per cell: microseconds per call inside a replayed graph (the GPU's
own time) and per eager call (launch included).

    python bench/ops.py --json results/ops.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.records import Record
from vllm_ddtree import ops, reference, residual, step
from vllm_ddtree.engine.state import TreeStore


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where to write the results")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--depth", type=int, default=15, help="draft depths L; 15 for block-16 checkpoints")
    parser.add_argument("--vocab", type=int, default=32_000, help="V of walk_coins and walk_residual")
    parser.add_argument("--draft-vocab", type=int, default=151_936, help="V of top_logps (Qwen3)")
    parser.add_argument("--layers", type=int, default=36, help="layers of the moved cache (K and V each)")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the drafter's 5 hidden rows")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--calls", type=int, default=20, help="calls captured per graph")
    parser.add_argument("--repeats", type=int, default=20, help="graph replays; the median is reported")
    return parser.parse_args()


def graph_us(call: Callable[[], None], calls: int, repeats: int) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def eager_us(call: Callable[[], None], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / calls


def cases(args: argparse.Namespace, n: int, nodes: int) -> dict[str, Callable[[], None]]:
    """One call per op on buffers made here, so that a call does nothing but the op."""
    device, q, depth = "cuda", nodes + 1, args.depth
    gen = torch.Generator(device).manual_seed(nodes)
    i32 = {"dtype": torch.int32, "device": device}
    i64 = {"dtype": torch.int64, "device": device}
    logits = torch.randn(n, depth, 4096, device=device, generator=gen) * 3
    logps, ids = logits.log_softmax(-1).topk(min(nodes, 512))
    budgets = torch.full((n,), nodes, **i32)
    tree = [torch.zeros(n, q, **i64), torch.zeros(n, q, **i32), torch.zeros(n, q, **i32)]
    tree += [torch.zeros(n, q, device=device), torch.zeros(n, **i32)]
    tied = [t.clone() for t in tree]
    coarse = (logps * 4).round() / 4
    ops.build(logps, ids, budgets, *tree)
    tokens, parents, _, _, counts = tree
    pointers = [torch.zeros(n, q, **i64), torch.zeros(n, q, **i32), torch.zeros(n, q, **i32)]
    ops.retrieve(parents, counts, *pointers)
    mask = torch.zeros(n, q, (q + 31) // 32, **i32)
    # The target follows some child of every node, so that walks are as deep as the tree lets them.
    drawn = torch.zeros(n, q, **i64)
    drawn.scatter_(1, parents[:, 1:].clamp_min(0).long(), tokens[:, 1:])
    out = [torch.zeros(n * q, **i64), torch.zeros(n, depth + 1, **i64), torch.zeros(n, **i32)]
    walk = (tokens, pointers[1], pointers[2], counts)
    probs = torch.rand(n, q, args.vocab, device=device, generator=gen)
    probs /= probs.sum(-1, keepdim=True)
    coins = torch.full((n, q), 0.99, device=device)
    finals = torch.full((n,), 0.5, device=device)
    coin_out = [t.clone() for t in out]
    drawn_from = probs[:, :depth].roll(1, -1).contiguous()
    # Half of the accepted nodes are out of place.
    local = torch.arange(depth + 1, device=device).clamp_max(nodes)
    local = torch.where(local > depth // 2, (local + depth // 2).clamp_max(nodes), local)
    accept = torch.arange(n, device=device).unsqueeze(1) * q + local
    start = torch.arange(n, **i32) * q
    blocks = -(-n * q // args.block_size)
    slots = torch.arange(n * q, device=device)
    src, dst = torch.zeros(n, depth, **i64), torch.zeros(n, depth, **i64)
    ops.plan_moves(accept, start, q, slots, src, dst)
    shape = (blocks, 2, args.block_size, args.heads, args.head_size)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(args.layers)]
    views = [half for cache in caches for half in cache.unbind(1)]
    table = ops.make_move_table(views)
    store = TreeStore(n, nodes, torch.device(device))
    rows = torch.arange(n, device=device)
    order, cu = rows.int(), torch.arange(n + 1, **i32) * q
    draft_logits = torch.randn(n * depth, args.draft_vocab, device=device, generator=gen).bfloat16()
    draft_probs = torch.zeros(n + 1, depth, args.draft_vocab, device=device)
    drafted = (
        draft_logits.view(n, depth, -1),
        torch.ones(n, device=device),
        rows,
        rows[:, None] + rows.new_zeros(depth),
        rows,
    )
    drafts = torch.zeros(n, nodes, **i64)
    step.build_trees(logps, ids, budgets, rows, store, drafts)
    positions, local_pos = torch.arange(n * q, device=device), torch.zeros(n * q, **i32)
    tree_len, step_mask = torch.zeros(n, **i32), torch.zeros_like(store.mask[:n])
    computed = torch.zeros(n, **i32)
    mover = step.CacheMover(views)
    hidden = [torch.zeros(n * q, args.hidden, dtype=torch.bfloat16, device=device) for _ in range(5)]
    flat = (drawn.flatten(), tokens.flatten().int(), cu, order, store, depth)
    in_step = {
        "step: top_logps": lambda: step.top_logps(draft_logits, min(nodes, 512)),
        "step: torch topk": lambda: draft_logits.float().log_softmax(-1).topk(min(nodes, 512)),
        "step: build_trees": lambda: step.build_trees(logps, ids, budgets, rows, store, drafts),
        "step: begin_step": lambda: step.begin_step(
            order, cu, cu, computed, store, positions, local_pos, step_mask, tree_len
        ),
        "step: walk_rows": lambda: step.walk_rows(*flat),
        "step: commit cache": lambda: mover.move(accept, cu, q, slots),
        "step: commit rows": lambda: step.commit_rows(hidden, positions, accept, cu, order, computed, q),
    }
    return in_step | {
        "build": lambda: ops.build(logps, ids, budgets, *tree),
        "build (many ties)": lambda: ops.build(coarse, ids, budgets, *tied),
        "retrieve": lambda: ops.retrieve(parents, counts, *pointers),
        "ancestor_mask": lambda: ops.ancestor_mask(parents, counts, mask),
        "walk": lambda: ops.walk(*walk, drawn, *out),
        "walk_coins": lambda: ops.walk_coins(*walk, probs, coins, finals, *coin_out),
        "walk_residual": lambda: ops.walk_residual(*walk, probs, drawn_from, coins, finals, *coin_out),
        "residual: draw_children": lambda: residual.draw_children(*drafted, min(nodes, 512), draft_probs),
        "plan_moves": lambda: ops.plan_moves(accept, start, q, slots, src, dst),
        "move_rows": lambda: ops.move_rows(views, table, src, dst),
    }


def verify_build(nodes: int, depth: int) -> None:
    """A wrong builder must not be timed: compares one tree with the reference."""
    gen = torch.Generator().manual_seed(0)
    logps, ids = torch.randn(1, depth, 512, generator=gen).log_softmax(-1).topk(min(nodes, 512))
    budgets = torch.tensor([nodes], dtype=torch.int32)
    wanted = reference.build(logps, ids, budgets, nodes)
    got = [torch.zeros_like(t, device="cuda") for t in wanted]
    ops.build(logps.cuda(), ids.cuda(), budgets.cuda(), *got)
    for a, b in zip(got, wanted, strict=False):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0)


def main() -> None:
    args = parse()
    if not ops.has_kernels("cuda"):
        raise SystemExit(
            f"bench/ops.py needs the compiled CUDA kernels and a GPU; found: {ops.kernels_error('cuda')}. "
            "There is nothing to time without: `python setup.py build_ext --inplace` where nvcc is."
        )
    record = Record(args.json, args)
    verify_build(max(args.nodes), args.depth)
    rows = []
    print(f"{'op':<20}{'n':>5}{'N':>6}{'graph us':>12}{'eager us':>12}")
    for n in args.requests:
        for nodes in args.nodes:
            for name, call in cases(args, n, nodes).items():
                row: dict[str, object] = {"op": name, "requests": n, "nodes": nodes}
                try:
                    row["graph_us"] = graph_us(call, args.calls, args.repeats)
                    row["eager_us"] = eager_us(call, args.calls)
                    print(f"{name:<20}{n:>5}{nodes:>6}{row['graph_us']:>12.2f}{row['eager_us']:>12.2f}")
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"
                    print(f"{name:<20}{n:>5}{nodes:>6}  {row['error']}")
                rows.append(row)
    record.write(rows)
    print(f"written: {args.json}")


if __name__ == "__main__":
    main()
