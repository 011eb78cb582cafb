"""Seeded sampling with trees reproduces the run without speculation, token for token, in float32."""

from __future__ import annotations

import pytest
from engines import engine, generate, prompts, tree
from vllm import SamplingParams

TOKENS = 8


def requests():
    """Greedy and sampled, plain and processed, one and several choices, in one batch."""
    common = {"max_tokens": TOKENS, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.5, seed=1, **common),
        SamplingParams(temperature=1.0, seed=2, top_k=20, **common),
        SamplingParams(temperature=1.5, seed=3, top_p=0.9, **common),
        SamplingParams(temperature=0.8, seed=4, min_p=0.05, **common),
        SamplingParams(temperature=1.0, seed=5, n=3, **common),
        SamplingParams(temperature=0.7, seed=6, logit_bias={65: 5.0, 66: -100.0}, **common),
        SamplingParams(temperature=0.0, allowed_token_ids=list(range(60, 110)), **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, **common),
        SamplingParams(temperature=0.9, seed=7, presence_penalty=0.8, frequency_penalty=-0.5, **common),
        SamplingParams(temperature=0.0, min_tokens=4, max_tokens=TOKENS),
        SamplingParams(temperature=0.0, bad_words=["a", "b"], **common),
    ]


def test_mixed_requests_equal_no_speculation(tiny):
    asked = prompts(len(requests()), seed=31)
    with engine(tiny) as llm:
        plain = generate(llm, asked, requests())
    with engine(tiny, tree(33)) as llm:
        assert generate(llm, asked, requests()) == plain


@pytest.mark.parametrize("count", [0, 5])
def test_logprobs_follow_the_path(tiny, count):
    asked = {"prompt_token_ids": prompts(1, seed=41)[0]}
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=count, prompt_logprobs=1
    )
    results = []
    for speculative in (None, tree(64)):
        with engine(tiny, speculative) as llm:
            results.append(llm.generate(asked, params, use_tqdm=False)[0])
    plain, ours = results
    assert ours.outputs[0].token_ids == plain.outputs[0].token_ids
    pairs = zip(
        [*plain.prompt_logprobs[1:], *plain.outputs[0].logprobs],
        [*ours.prompt_logprobs[1:], *ours.outputs[0].logprobs],
        strict=True,
    )
    for theirs, mine in pairs:
        assert mine.keys() == theirs.keys()
        for token, entry in theirs.items():
            assert mine[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert mine[token].rank == entry.rank
