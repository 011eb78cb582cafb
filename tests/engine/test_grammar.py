"""The matcher that walks a tree, against a fresh matcher on every node's own path."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from vllm_ddtree.engine import grammar, hooks

NODES = 40
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22, 333]}, "tags": {"type": "array", "items": {"enum": ["x", "yy"]}}},
    "required": ["a", "tags"],
    "additionalProperties": False,
}
REGEX = "(a|ab|abc){1,3}-[0-9]{2}"


@pytest.fixture(scope="module")
def backends(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny[0])
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=True, disable_additional_properties=False
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=NODES),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
    )
    arguments = {"tokenizer": tokenizer, "vocab_size": len(tokenizer)}
    found = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}
    return {name: make(config, **arguments) for name, make in found.items()}


def allowed(mask: torch.Tensor, vocab: int) -> list[int]:
    bits = mask.numpy().view("uint32")
    return [token for token in range(vocab) if bits[token >> 5] >> (token & 31) & 1]


def mask_of(compile_, path: list[int], row: torch.Tensor) -> torch.Tensor:
    """The mask after a path, by a matcher of its own; all ones behind an end or a refused token."""
    matcher = compile_()
    for token in path:
        if matcher.is_terminated() or matcher.validate_tokens([token]) != [token]:
            return torch.full_like(row[0], -1)
        matcher.accept_tokens("", [token])
    if matcher.is_terminated():
        return torch.full_like(row[0], -1)
    matcher.fill_bitmask(row, 0)
    return row[0].clone()


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
@pytest.mark.parametrize(
    "spec",
    [(StructuredOutputOptions.JSON, json.dumps(SCHEMA)), (StructuredOutputOptions.REGEX, REGEX)],
    ids=["json", "regex"],
)
def test_every_row_is_its_own_paths(backends, name, spec):
    backend = backends[name]
    vocab = backend.vocab_size
    masks, one = backend.allocate_token_bitmask(NODES + 1), backend.allocate_token_bitmask(1)
    kinds = set()

    def compile_():
        return backend.compile_grammar(*spec)

    for seed in range(6):
        draw = random.Random(seed)
        matcher = compile_()
        start = mask_of(compile_, [], one)
        paths, parents, tokens = [[]], [], []
        for node in range(NODES):
            parent = draw.randrange(max(0, node - 9), node + 1)
            good = allowed(mask_of(compile_, paths[parent], one), vocab)
            token = draw.choice(good if draw.random() < 0.85 else range(vocab))
            parents.append(parent)
            tokens.append(token)
            paths.append([*paths[parent], token])
        # vLLM's loop: fill a row, accept the next draft, and so on; the last row; back to the start.
        walk = grammar.TreeGrammar(matcher, parents)
        for row, token in enumerate(tokens):
            walk.fill_bitmask(masks, row)
            assert not walk.is_terminated() and walk.accept_tokens("", [token])
        walk.fill_bitmask(masks, NODES)
        walk.rollback(NODES)
        for node, path in enumerate(paths):
            wanted = mask_of(compile_, path, one)
            kinds.add("closed" if bool((wanted == -1).all()) else "open")
            assert torch.equal(masks[node], wanted), (node, path)
        matcher.fill_bitmask(one, 0)
        assert torch.equal(one[0], start), "the matcher is where it was"
    assert kinds == {"open", "closed"}


def test_drafts_and_parents_travel_together():
    tokens = torch.tensor([[5, 151_935, 7], [1, 2, 3]])
    parents = torch.tensor([[0, 0, 2], [0, 1, 2]], dtype=torch.int32)
    packed = grammar.pack(tokens, parents, torch.tensor([False, True])).tolist()
    assert packed[1] == [1, 2, 3]
    manager = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"ddtree": {}}))
    structured = SimpleNamespace()
    request = SimpleNamespace(use_structured_output=True, structured_output_request=structured)
    stock = []
    validate = hooks._wrap_validate_tokens(lambda *a: stock.append(a) or a[2])
    assert validate(manager, request, [*packed[0], -1, -1]) == [5, 151_935, 7]
    assert structured._ddtree_parents == [0, 0, 2]
    assert not stock and validate(manager, request, packed[1]) == [1, 2, 3] and len(stock) == 1
