"""Greedy text on a GPU: trees against no speculation, in float32 and bf16, graphs and eager.

    python bench/check.py --target DIR --drafter DIR --out result.json

Prints every difference with the gap between the two best log-probabilities at that position, as the run
without speculation saw them; a difference at a gap above ``--noise`` fails. All engines are up at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.e2e import CHAT
from bench.engines import Engine, llm_settings
from bench.records import Record

# A float32 sum of a few thousand terms in another order moves a logit by about 1e-4; bf16 rounds hidden
# states at 2^-8, which moves logits of this size by up to a few tenths.
NOISE = {"float32": 2e-3, "bfloat16": 0.5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = Record(args.out, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    engines = {
        name: Engine(name, settings, args.out.with_suffix(f".{name}.log")) for name, settings in modes(args)
    }
    failed = False
    results: list[dict[str, Any]] = []
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    prompts = [text + "\n" for text in CHAT]
    for name, engine in engines.items():
        try:
            engine.wait()
            for count in (1, 3, 8):
                ask = {"prompts": prompts[:count], "temperature": 0.0, "max_tokens": args.max_tokens}
                answers[name, str(count)] = engine.ask(
                    **ask, want_output=True, want_gaps=name.endswith("none")
                )
        except RuntimeError as error:
            failed = True
            print(f"{name}: FAILED\n{error}")
            results.append({"mode": name, "error": str(error), "failed": True})
        finally:
            engine.stop()
    for (name, count), answer in answers.items():
        dtype = name.split("-")[0]
        plain = answers.get((f"{dtype}-none", count))
        if name.endswith("none") or plain is None:
            continue
        differences = []
        for row, (ours, theirs) in enumerate(zip(answer["output"], plain["output"], strict=True)):
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if at is not None:
                differences.append({"request": row, "position": at, "gap": plain["gaps"][row][at]})
        bad = [d for d in differences if d["gap"] > NOISE[dtype]]
        failed |= bool(bad)
        results.append({"mode": name, "batch": count, "differences": differences, "failed": bool(bad)})
        print(
            f"{name:>24} batch {count}: {len(differences)} of {count} texts differ, accepted length "
            f"{answer['accepted_length']:.2f} {'FAILED ' if bad else ''}{differences}"
        )
    record.write(results)
    return int(failed)


def modes(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Name and LLM arguments of every engine."""
    found: list[tuple[str, dict[str, Any]]] = []
    for dtype in args.dtypes:
        base = llm_settings(args.target, 1024, 8, 4096, kv_gib=2) | {"dtype": dtype}
        found.append((f"{dtype}-none", base))
        for nodes in args.nodes:
            tree = {"method": "ddtree", "model": args.drafter, "num_speculative_tokens": nodes}
            found.append((f"{dtype}-graphs-{nodes}", base | {"speculative_config": tree}))
        found.append(
            (f"{dtype}-eager-{args.nodes[-1]}", base | {"speculative_config": tree, "enforce_eager": True})
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
