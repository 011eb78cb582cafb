"""What a warm engine must no longer do on a GPU: wait for the device, compile, or capture a graph.

    python bench/steady.py --target DIR --drafter DIR --nodes 64 --out result.json

Serves every batch size twice, greedy and sampled, then counts over a third pass: host synchronisations that
torch's sync debug mode reports, with the line that caused them; torch.compile graphs; Triton compilations;
CUDA graph captures. Exits with 1 when a synchronisation comes from ddtree's own code, or anything was
compiled or captured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.engines import Engine, all_up, llm_settings, modes
from bench.records import Record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--profile", type=Path, help="write host and GPU time of a step at batch 1 here")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = Record(args.out, args)
    name = f"tree{args.nodes or ''}"
    settings = llm_settings(args.target, 1024, args.max_num_seqs, 8192, kv_gib=2) | {"dtype": "bfloat16"}
    settings |= modes(args.drafter, [args.nodes], args.max_num_seqs)[name]
    with all_up({name: settings}, args.out) as engines:
        counts = steady(engines[name], list(range(1, args.max_num_seqs + 1)))
        print(json.dumps(counts, indent=1))
        record.write([{"steady": name} | counts])
        if args.profile:
            engines[name].profile(args.profile)
    return int(bool(broken(counts)))


def steady(engine: Engine, batches: list[int]) -> dict[str, Any]:
    """Counts over a third pass of every batch size, greedy and sampled, ragged prompts."""
    for round_ in range(3):
        if round_ == 2:
            engine.watch()
        for batch in batches:
            prompts = [
                [(17 * i + 3 * j + round_) % 5000 for j in range(20 + 7 * (i % 8))] for i in range(batch)
            ]
            for temperature in (0.0, 1.0):
                engine.ask(prompts=prompts, temperature=temperature, max_tokens=64, seed=round_)
    return engine.counts()


def broken(counts: dict[str, Any]) -> list[str]:
    """What must not have happened."""
    found = [f"{name}: {n}" for name, n in counts.items() if name != "syncs" and n]
    return found + [f"{place}: {n}" for place, n in counts["syncs"].items() if "vllm_ddtree" in place]


if __name__ == "__main__":
    sys.exit(main())
