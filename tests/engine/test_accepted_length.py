"""Accepted length in the engine equals that of the same pair in plain PyTorch, on the same text."""

from __future__ import annotations

import pytest
import torch
from engines import accepted_length, engine, generate, greedy, tree
from plain_dflash import PlainDrafter, accepted, greedy_text
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "def fibonacci(n):\n",
    "The capital of France is",
    "Once upon a time there was a small village",
    "import numpy as np\n\ndef mean(values):\n",
)
TOKENS = 24


@pytest.fixture(scope="module")
def plain(real):
    target, drafter = real
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.detach()
    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = [tokenizer(text)["input_ids"] for text in PROMPTS]
    answers = [greedy_text(model, prompt, TOKENS + 17) for prompt in asked]
    return model, PlainDrafter(drafter, embedding, embedding), asked, answers


@pytest.mark.parametrize("nodes", [0, 16, 64])
def test_engine_equals_plain_pytorch(real, plain, nodes):
    model, drafter, asked, answers = plain
    counts = [accepted(model, drafter, p, a, TOKENS, nodes) for p, a in zip(asked, answers, strict=True)]
    expected = 1 + sum(total for _, total in counts) / sum(steps for steps, _ in counts)
    config = tree(nodes) if nodes else {"method": "dflash", "num_speculative_tokens": 15}
    with engine(real, config) as llm:
        assert generate(llm, asked, greedy(TOKENS)) == [answer[:TOKENS] for answer in answers]
        assert accepted_length(llm) == pytest.approx(expected, rel=0.01)
    assert expected > 1.5


def test_a_tree_accepts_at_least_what_the_chain_does(plain):
    model, drafter, asked, answers = plain

    def length(nodes):
        counts = [accepted(model, drafter, p, a, TOKENS, nodes) for p, a in zip(asked, answers, strict=True)]
        return 1 + sum(total for _, total in counts) / sum(steps for steps, _ in counts)

    chain = length(0)
    assert all(length(nodes) >= chain for nodes in (16, 32, 64))
