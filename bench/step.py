"""The time of one decode step by stage, and the speed at imposed accepted lengths, for Qwen3-8B's real shape.

    python bench/step.py --out result.json            (needs a GPU)

Weights are dummies, so accepted lengths are imposed on the chain and the trees (``--synthetic``: what is
published for the pair). All engines are up at once and take turns. Per step, medians: GPU time between CUDA
events around the stages of the model runner: verify (inputs, attention metadata, target forward),
walk + commit (logits and sampling included) and draft + build (drafter forward included); ``own`` is what
is ours alone of these outside the graphs (positions and masks, walk, commit; ops.py times the build);
the host's time in the same calls; the wall clock. Speed is accepted length over wall time, against no
speculation in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.engines import Engine, all_up, llm_settings, modes
from bench.models import write_configs
from bench.plot import draw
from bench.records import Record


def main() -> None:
    """Start every engine, measure every cell, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--synthetic", type=float, nargs=2, metavar=("CHAIN", "TREE"), default=[7.79, 9.75])
    parser.add_argument("--kv-gib", type=float, default=10.0, help="of each engine; bigger cells are skipped")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = Record(args.out, args)
    target, drafter = write_configs(Path(tempfile.mkdtemp()), "8b")
    seqs = max(args.batches)
    length = max(args.contexts) + args.max_tokens + 600
    common = llm_settings(str(target), length, seqs, max(16384, seqs * 600), args.kv_gib)
    common |= {"load_format": "dummy", "skip_tokenizer_init": True}
    wanted = modes(str(drafter), args.nodes, seqs, args.synthetic)
    with all_up({name: common | extra for name, extra in wanted.items()}, args.out) as engines:
        _measure(engines, args, record)
    draw(args.out)


def _measure(engines: dict[str, Engine], args: argparse.Namespace, record: Record) -> None:
    # 36 target layers and 5 of the drafter, 8 heads of 128, K and V, bf16
    capacity = args.kv_gib * 2**30 / (41 * 8 * 128 * 2 * 2)
    rows: list[dict[str, Any]] = []
    for context, batch in itertools.product(args.contexts, args.batches):
        if batch * (context + args.max_tokens + 300) > capacity:
            print(f"b={batch} ctx={context}: skipped, needs more than --kv-gib {args.kv_gib}")
            continue
        prompts = [[(i * 131 + j * 7) % 100_000 for j in range(context)] for i in range(batch)]
        base = None
        for name, engine in engines.items():
            ask = {"prompts": prompts, "temperature": 0.0, "max_tokens": args.max_tokens}
            engine.ask(**ask)  # prompts are cached afterwards
            answer = engine.ask(**ask, want_stages=True)
            row = {"mode": name, "batch": batch, "context": context, **answer["stages"]}
            row["accepted_length"] = answer["accepted_length"]
            row["tokens_per_second"] = batch * answer["accepted_length"] / row["wall_ms"] * 1000
            base = base or row["tokens_per_second"]
            row["speedup"] = row["tokens_per_second"] / base
            rows.append(row)
            print(_line(row), flush=True)
        record.write(rows)


def _line(row: dict[str, Any]) -> str:
    gpu, host = (" ".join(f"{k} {v:.3f}" for k, v in row[side].items()) for side in ("gpu_ms", "host_ms"))
    return (
        f"{row['mode']:>8} b={row['batch']:<3} ctx={row['context']:<6} wall {row['wall_ms']:7.3f} ms | "
        f"len {row['accepted_length']:.2f} {row['tokens_per_second']:.0f} tok/s {row['speedup']:.2f}x | "
        f"gpu {gpu} | host {host}"
    )


if __name__ == "__main__":
    main()
