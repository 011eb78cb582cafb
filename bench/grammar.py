"""Host time per step of making grammar bitmasks: a chain of 15 nodes against trees.

    python bench/grammar.py [--json FILE] [--repeats N]
    python bench/grammar.py --accepted [--nodes 64]      # accepted lengths on a CPU, minutes

One request whose answer is a JSON document under a schema of an ordinary size, with SmolLM2's vocabulary.
Drafts follow the document; a tree's other candidates are tokens that the grammar allows at that depth, or,
for half of them, any token. The chain is what vLLM does: validate the draft, then fill and accept node by
node, roll back. The tree is what ddtree does: the same loop, and then the tree depth first with one roll back
per edge; a child that the grammar refuses drops out with everything under it. Both only measure the host:
nothing here runs a model.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.records import Record

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".models" / "SmolLM2-135M-Instruct"
DEPTH = 15  # a drafter of block size 16
TREES = (16, 32, 64)
SCHEMA = {
    "type": "object",
    "properties": {
        "order_id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "email": {"type": "string"},
                "tier": {"enum": ["bronze", "silver", "gold"]},
            },
            "required": ["name", "email", "tier"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string"},
                    "quantity": {"type": "integer"},
                    "price": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["sku", "quantity", "price"],
                "additionalProperties": False,
            },
        },
        "paid": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["order_id", "customer", "items", "paid", "note"],
    "additionalProperties": False,
}
DOCUMENT = {
    "order_id": "AB-204981",
    "customer": {"name": "Ada Lovelace", "email": "ada@example.org", "tier": "gold"},
    "items": [
        {"sku": "lamp-12", "quantity": 2, "price": 19.5, "tags": ["home", "light"]},
        {"sku": "desk-oak", "quantity": 1, "price": 240.0},
        {"sku": "cable usb c", "quantity": 10, "price": 3.25, "tags": []},
    ],
    "paid": True,
    "note": "Leave the parcel with the neighbour on the second floor, please.",
}


def make_backend(name, tokenizer, nodes):
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=False, disable_additional_properties=False
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=nodes),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
    )
    return {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}[name](
        config, tokenizer=tokenizer, vocab_size=len(tokenizer)
    )


def chain_step(grammar, drafts, bitmask):
    """vLLM's own work: validate the draft, then a mask for every position and the bonus."""
    drafts = grammar.validate_tokens(drafts)
    for row, token in enumerate(drafts):
        grammar.fill_bitmask(bitmask, row)
        grammar.accept_tokens("", [token])
    grammar.fill_bitmask(bitmask, len(drafts))
    if drafts:
        grammar.rollback(len(drafts))
    return len(drafts) + 1


def tree_step(grammar, tokens, parents, bitmask):
    """What the engine does: vLLM's loop, on a matcher that then walks the tree."""
    from vllm_ddtree.engine.grammar import TreeGrammar

    walk = TreeGrammar(grammar, parents)
    for row, token in enumerate(tokens):
        walk.fill_bitmask(bitmask, row)
        walk.accept_tokens("", [token])
    walk.fill_bitmask(bitmask, len(tokens))
    walk.rollback(len(tokens))
    return 1 + int((bitmask[1 : len(tokens) + 1] != -1).any(dim=1).sum())


def candidates(grammar, truth, vocab, bitmask, draw, count=8):
    """Candidates per depth: the document's token first, then allowed ones and any, half and half."""
    rows = []
    for token in truth:
        grammar.fill_bitmask(bitmask, 0)
        bits = bitmask[0].numpy().view("uint32")
        other = [t for t in draw.sample(range(vocab), 2000) if t != token]
        allowed = [t for t in other if bits[t // 32] >> (t % 32) & 1][: count // 2]
        rest = [t for t in other if t not in allowed]
        # Every second one is allowed, as long as there are any.
        mixed = [t for pair in zip(allowed, rest, strict=False) for t in pair]
        rows.append([token, *(mixed + rest[len(allowed) :])[: count - 1]])
        grammar.accept_tokens("", [token])
    grammar.rollback(len(truth))
    return rows


def best_first(rows, nodes):
    """The tree of a drafter that gives its first choice 60%, the second 60% of the rest, and so on."""
    from vllm_ddtree import reference

    logps = torch.log(torch.tensor([0.6 * 0.4**rank for rank in range(len(rows[0]))]))
    top = logps.expand(1, len(rows), -1)
    tokens, parents, *_, count = reference.build(
        top, torch.tensor([rows]), torch.tensor([nodes], dtype=torch.int32), nodes
    )
    real = slice(1, int(count) + 1)
    return tokens[0, real].tolist(), parents[0, real].tolist()


def measure(name, tokenizer, repeats):
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    backend = make_backend(name, tokenizer, max(TREES))
    began = time.perf_counter()
    grammar = backend.compile_grammar(StructuredOutputOptions.JSON, json.dumps(SCHEMA))
    compiled = time.perf_counter() - began
    bitmask = backend.allocate_token_bitmask(max(TREES) + 1)
    truth = tokenizer.encode(json.dumps(DOCUMENT), add_special_tokens=False)
    draw = random.Random(0)
    times = {"chain 15": []} | {f"tree {nodes}": [] for nodes in TREES}
    filled = {key: [] for key in times}
    for at in range(0, len(truth) - DEPTH, 3):
        rows = candidates(grammar, truth[at : at + DEPTH], len(tokenizer), bitmask, draw)
        steps = {"chain 15": (chain_step, truth[at : at + DEPTH])}
        steps |= {f"tree {nodes}": (tree_step, *best_first(rows, nodes)) for nodes in TREES}
        for key, (step, *drafts) in steps.items():
            runs = []
            for _ in range(repeats):
                began = time.perf_counter()
                masks = step(grammar, *drafts, bitmask)
                runs.append((time.perf_counter() - began) * 1e3)
            times[key].append(statistics.median(runs))
            filled[key].append(masks)
        grammar.accept_tokens("", truth[at : at + 3])
    return {
        "backend": name,
        "compile_ms": round(compiled * 1e3, 2),
        "positions": len(times["chain 15"]),
        "steps": {
            key: {
                "median_ms": round(statistics.median(values), 3),
                "p95_ms": round(statistics.quantiles(values, n=20)[-1], 3),
                "masks": round(statistics.mean(filled[key]), 1),
            }
            for key, values in times.items()
        },
    }


REQUESTS = {
    "Describe a fictional person as JSON with name, age, city and hobbies.": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
    },
    "Describe a famous book as JSON with title, author, year, genre and summary.": {
        "title": {"type": "string"},
        "author": {"type": "string"},
        "year": {"type": "integer"},
        "genre": {"enum": ["fiction", "history", "science", "poetry"]},
        "summary": {"type": "string"},
    },
    "Give a recipe for vegetable soup as JSON with title, minutes and steps.": {
        "title": {"type": "string"},
        "minutes": {"type": "integer"},
        "steps": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
    },
}


def accepted(nodes, backend):
    """Accepted length of greedy JSON answers by a real engine, as chains and as trees."""
    from unittest import mock

    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=80,
            structured_outputs=StructuredOutputsParams(
                json={"type": "object", "properties": fields, "required": list(fields)}
            ),
        )
        for fields in REQUESTS.values()
    ]
    texts = []
    for kind in ("chain", "tree"):
        llm = LLM(
            str(TARGET),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=3,
            max_num_batched_tokens=1024,
            structured_outputs_config={"backend": backend, "disable_any_whitespace": True},
            speculative_config={
                "method": "ddtree",
                "model": str(ROOT / "models" / "smollm2-135m-instruct-dflash"),
                "num_speculative_tokens": nodes,
                "ddtree_grammar": kind,
            },
        )
        # vLLM's own count leaves out steps whose drafts the grammar refused altogether.
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        runner.sample = counted = mock.Mock(side_effect=runner.sample)
        outputs = [
            llm.chat([{"role": "user", "content": text}], one, use_tqdm=False)[0].outputs[0]
            for text, one in zip(REQUESTS, params, strict=True)
        ]
        texts.append([output.text for output in outputs])
        # The first token of an answer comes from the prompt's own step.
        tokens = sum(len(output.token_ids) - 1 for output in outputs)
        steps = counted.call_count - len(outputs)
        print(f"{backend} {kind}: {tokens / steps:.2f} tokens per step, {steps} steps", flush=True)
        llm.llm_engine.engine_core.shutdown()
    print("same text" if texts[0] == texts[1] else f"texts differ: {texts}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--accepted", action="store_true")
    parser.add_argument("--nodes", type=int, default=64, help="with --accepted")
    parser.add_argument("--backend", default="xgrammar", help="with --accepted")
    options = parser.parse_args()
    if options.accepted:
        accepted(options.nodes, options.backend)
        return
    record = Record(options.json, options) if options.json else None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    results = [measure(name, tokenizer, options.repeats) for name in ("xgrammar", "guidance")]
    print("| backend | draft | masks | median ms | p95 ms |\n|---|---|---|---|---|")
    for result in results:
        for key, row in result["steps"].items():
            print(f"| {result['backend']} | {key} | {row['masks']} | {row['median_ms']} | {row['p95_ms']} |")
    if record:
        record.write(results)


if __name__ == "__main__":
    main()
