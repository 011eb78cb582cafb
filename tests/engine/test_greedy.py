"""Greedy text with trees equals the text without speculation, token for token, in float32."""

from __future__ import annotations

import pytest
from engines import accepted_length, engine, generate, greedy, prompts, tree

TOKENS = 6


@pytest.fixture(scope="module")
def plain(tiny):
    with engine(tiny) as llm:
        return generate(llm, prompts(20), greedy(TOKENS))


@pytest.mark.parametrize("nodes", [1, 7, 16, 33, 64])
@pytest.mark.parametrize("batch", [1, 4])
def test_text_equals_no_speculation(tiny, plain, nodes, batch):
    with engine(tiny, tree(nodes), max_num_seqs=batch) as llm:
        assert generate(llm, prompts(20), greedy(TOKENS)) == plain
        if nodes >= 33:
            assert accepted_length(llm) > 1.05


def test_chain_of_the_same_drafter_accepts_less(tiny):
    lengths = []
    for config in ({"method": "dflash", "num_speculative_tokens": 7}, tree(16), tree(64)):
        with engine(tiny, config) as llm:
            generate(llm, prompts(8), greedy(TOKENS))
            lengths.append(accepted_length(llm))
    chain, small, large = lengths
    assert chain <= small <= large
