"""The other derivers in the real engine: greedy text of no speculation, seeded text that repeats itself, and
what they sample against the exact distribution."""

from __future__ import annotations

import math

import pytest
from engines import accepted_length, engine, generate, greedy, prompts, tree
from vllm import SamplingParams

ALLOWED = list(range(60, 70))
SIGMAS = 5.0
WIDE = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}


def sampled(seed):
    return SamplingParams(
        temperature=1.2, seed=seed, max_tokens=10, ignore_eos=True, allowed_token_ids=ALLOWED
    )


@pytest.mark.parametrize("deriver", ["coins", "residual"])
def test_same_greedy_text_and_repeatable_samples(tiny, deriver):
    asked = prompts(4, seed=51)
    texts = [greedy(10), greedy(10, repetition_penalty=1.3), greedy(10, allowed_token_ids=ALLOWED)]
    with engine(tiny) as llm:
        plain = generate(llm, asked[:3], texts)
    with engine(tiny, tree(33, ddtree_deriver=deriver)) as llm:
        assert generate(llm, asked[:3], texts) == plain
        params = [sampled(i) for i in range(4)]
        first = generate(llm, asked, params)
        # another order and company, and with it other batch rows
        again = generate(llm, asked[::-1], params[::-1])[::-1]
    assert first == again
    assert {token for row in first for token in row} <= set(ALLOWED)
    assert len({tuple(row) for row in first}) == 4


def distributions(llm, prefixes):
    """The target's distribution after each prefix, as {token: probability}."""
    params = SamplingParams(temperature=1.0, max_tokens=1, logprobs=-1)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prefixes], params, use_tqdm=False)
    return [{t: math.exp(entry.logprob) for t, entry in o.outputs[0].logprobs[0].items()} for o in outputs]


def test_residual_samples_are_the_targets(tiny):
    """Second and third tokens of 160 answers at temperature 1, whose drafts really are accepted.

    Two sums over the answers against their exact mean and variance given what came before: the
    log-probability and the probability of what was said, which tokens of the drafter alone would lower.
    False-alarm rate below 1e-6 each.
    """
    prompt, requests = prompts(1, seed=3)[0], 160
    with engine(tiny, tree(16, ddtree_deriver="residual"), **WIDE) as llm:
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=3, ignore_eos=True) for i in range(requests)
        ]
        answers = generate(llm, [prompt] * requests, params)
        assert accepted_length(llm) > 1.3
    with engine(tiny, max_logprobs=-1, **WIDE) as llm:
        for length in (1, 2):
            rows = distributions(llm, [prompt + answer[:length] for answer in answers])
            for value in (math.log, lambda p: p):
                said, mean, variance = 0.0, 0.0, 0.0
                for answer, row in zip(answers, rows, strict=True):
                    expected = sum(p * value(p) for p in row.values() if p > 0)
                    said += value(row[answer[length]])
                    mean += expected
                    variance += sum(p * value(p) ** 2 for p in row.values() if p > 0) - expected**2
                assert abs(said - mean) < SIGMAS * math.sqrt(variance), (length, said, mean, variance**0.5)
