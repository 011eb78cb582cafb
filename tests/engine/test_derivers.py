"""The coin form in the real engine: greedy text of no speculation, seeded text that repeats itself."""

from __future__ import annotations

from engines import engine, generate, greedy, prompts, tree
from vllm import SamplingParams

ALLOWED = list(range(60, 70))


def sampled(seed):
    return SamplingParams(
        temperature=1.2, seed=seed, max_tokens=10, ignore_eos=True, allowed_token_ids=ALLOWED
    )


def test_coins(tiny):
    asked = prompts(4, seed=51)
    texts = [greedy(10), greedy(10, repetition_penalty=1.3), greedy(10, allowed_token_ids=ALLOWED)]
    with engine(tiny) as llm:
        plain = generate(llm, asked[:3], texts)
    with engine(tiny, tree(33, ddtree_deriver="coins")) as llm:
        assert generate(llm, asked[:3], texts) == plain
        params = [sampled(i) for i in range(4)]
        first = generate(llm, asked, params)
        # another order and company, and with it other batch rows
        again = generate(llm, asked[::-1], params[::-1])[::-1]
    assert first == again
    assert {token for row in first for token in row} <= set(ALLOWED)
    assert len({tuple(row) for row in first}) == 4
