"""Would children sampled without replacement accept more than the most probable ones, at temperature >= 1?

    python scripts/measure_probabilistic.py --target DIR --drafter DIR --out result.json     (CPU, minutes)

Plain PyTorch on a real pair, the same number of nodes for both rules. `best-first`: the default tree and the
target's own draws. `sampled`: at every node of a fixed shape the children are drawn without replacement from
the drafter at the same temperature, and tried with residual rejection (p becomes max(p - q, 0), q loses the
tried token). The shape may not depend on the draws, or the rule would not be lossless, so it is the
best-first tree of the drafter's mean probability by rank. Prints mean accepted lengths, the bonus counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from plain_dflash import PlainDrafter

from vllm_ddtree import reference

PROMPTS = (
    "def fibonacci(n):\n",
    "The capital of France is",
    "Once upon a time there was a small village",
    "import numpy as np\n\ndef mean(values):\n",
    "Explain why the sky is blue to a child.\n",
    "class Stack:\n    def __init__(self):\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="emitted per prompt and rule")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.5])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.detach()
    drafter = PlainDrafter(args.drafter, embedding, embedding)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    results = []
    for temperature in args.temperatures:
        rng = torch.Generator().manual_seed(0)
        steps: dict[str, list[int]] = {"best-first": [], "sampled": []}
        shape = None
        for rule, lengths in steps.items():
            masses = []
            for text in PROMPTS:
                ids = tokenizer(text)["input_ids"]
                end = len(ids) + args.tokens
                while len(ids) < end:
                    logps = _draft(model, drafter, ids, temperature)
                    masses.append(logps.exp().sort(-1, descending=True).values[:, : args.nodes])
                    if rule == "best-first":
                        length = _best_first(model, ids, logps, args.nodes, temperature, rng)
                    else:
                        assert shape is not None
                        length = _sampled(model, ids, logps, shape, temperature, rng)
                    lengths.append(length)
            if shape is None:  # of the mean drafter, fixed before anything is drawn from it
                mean = torch.stack(masses).mean(0).log()
                ranks = torch.arange(args.nodes).expand(len(mean), -1)
                budget = torch.tensor([args.nodes], dtype=torch.int32)
                _, parents, _, _, count = reference.build(mean[None], ranks[None], budget, args.nodes)
                shape = parents[0, : int(count[0]) + 1].tolist()
        row: dict[str, Any] = {"temperature": temperature, "nodes": args.nodes}
        for rule, lengths in steps.items():
            spread = statistics.stdev(lengths) / len(lengths) ** 0.5
            row[rule] = {"mean": statistics.mean(lengths), "error": spread, "steps": len(lengths)}
            print(
                f"T={temperature} {rule}: {row[rule]['mean']:.2f} +- {spread:.2f} over {len(lengths)} steps",
                flush=True,
            )
        results.append(row)
    args.out.write_text(json.dumps(results, indent=1))


def _scores(model: Any, ids: list[int], temperature: float) -> Tensor:
    return torch.softmax(model(torch.tensor([ids])).logits[0, -1] / temperature, -1)


@torch.inference_mode()
def _draft(model: Any, drafter: PlainDrafter, ids: list[int], temperature: float) -> Tensor:
    """The drafter's log-probabilities after the last token, at the temperature."""
    states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    hidden = [states[i + 1][0] for i in drafter.layer_ids]
    return torch.log_softmax(drafter.log_probs(hidden, ids[-1]) / temperature, -1)


@torch.inference_mode()
def _best_first(
    model: Any, ids: list[int], logps: Tensor, nodes: int, temperature: float, rng: torch.Generator
) -> int:
    """Emit along the default tree; returns the tokens of the step, appended to ``ids``."""
    top, tokens = logps.topk(nodes, -1)
    budget = torch.tensor([nodes], dtype=torch.int32)
    names, parents, _, _, _ = reference.build(top[None], tokens[None], budget, nodes)
    family = [(int(p), int(t)) for p, t in zip(parents[0], names[0], strict=True)]
    node: int | None = 0
    emitted = 0
    while node is not None:
        token = int(torch.multinomial(_scores(model, ids, temperature), 1, generator=rng))
        ids.append(token)
        emitted += 1
        node = next((i for i, pair in enumerate(family) if i and pair == (node, token)), None)
    return emitted


@torch.inference_mode()
def _sampled(
    model: Any,
    ids: list[int],
    logps: Tensor,
    shape: list[int],
    temperature: float,
    rng: torch.Generator,
) -> int:
    """Emit along a tree of sampled children; returns the tokens of the step, appended to ``ids``."""
    node, emitted = 0, 0
    while True:
        p = _scores(model, ids, temperature).double()
        children = [i for i, parent in enumerate(shape) if parent == node and i]
        q = logps[min(emitted, len(logps) - 1)].exp().double()
        accepted = None
        for child in children:
            token = int(torch.multinomial(q, 1, generator=rng))
            if float(torch.rand((), generator=rng)) * float(q[token]) < float(p[token]):
                accepted = (child, token)
                break
            p = (p - q).clamp(min=0)
            p /= p.sum()
            q[token] = 0
            q /= q.sum()
        emitted += 1
        if accepted is None:
            ids.append(int(torch.multinomial(p, 1, generator=rng)))
            return emitted
        node, token = accepted
        ids.append(token)


if __name__ == "__main__":
    main()
