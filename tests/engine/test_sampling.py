"""Seeded sampling with trees reproduces the run without speculation, token for token, in float32."""

from __future__ import annotations

import pytest
from engines import engines, generate, prompts, tree
from vllm import SamplingParams

TOKENS = 4
TEMPERATURES = (0.3, 0.7, 1.0, 1.3, 2.0)
CUTS = ({}, {"top_k": 10}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.05})
COMMON = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def llms(tiny):
    with engines(tiny, tree(12), max_num_seqs=12, max_num_batched_tokens=1024) as both:
        yield both


def seeded(temperature, **changes):
    return SamplingParams(temperature=temperature, **(COMMON | {"seed": 17} | changes))


def mixed():
    """Greedy, seeded and unseeded, plain and cut, one and four choices, in one batch."""
    cuts = zip(TEMPERATURES, CUTS, strict=True)
    return [
        *(seeded(t, seed=100 + i, n=4, **cut) for i, (t, cut) in enumerate(cuts)),
        SamplingParams(temperature=0.0, **COMMON),
        SamplingParams(temperature=1.0, **COMMON),
        SamplingParams(temperature=0.0, n=1, seed=3, **COMMON),
        SamplingParams(temperature=1.7, top_k=5, n=2, **COMMON),
    ]


def comparable(texts, params):
    """Texts of the requests whose noise is fixed; unseeded ones differ from run to run."""
    choices = [p for p in params for _ in range(p.n)]
    return [text for text, p in zip(texts, choices, strict=True) if p.seed is not None or p.temperature == 0]


def test_mixed_batch_equals_no_speculation(llms):
    params = mixed()
    asked = prompts(len(params), seed=31)
    plain, ours = (comparable(generate(llm, asked, params), params) for llm in llms)
    assert ours == plain
    assert len({tuple(text) for text in plain[:4]}) > 1  # the four choices of a request differ


@pytest.mark.slow
def test_every_temperature_and_cut_equals_no_speculation(llms):
    params = [
        seeded(t, seed=1000 + 10 * i + j, n=4, **cut)
        for i, t in enumerate(TEMPERATURES)
        for j, cut in enumerate(CUTS)
    ]
    asked = prompts(len(params), seed=32)
    plain, ours = (generate(llm, asked, params) for llm in llms)
    assert ours == plain


def test_seeds_do_not_depend_on_the_batch(llms):
    """vllm#6038: a seeded request says the same alone, among others, reordered and beside itself."""
    _, ours = llms
    (asked, *others), mine = prompts(5, seed=33), seeded(1.1, top_p=0.95)
    free = SamplingParams(temperature=1.0, **COMMON)
    (alone,) = generate(ours, [asked], mine)
    for batch, params, place in (
        ([asked, *others], [mine, free, free, mine, free], 0),
        ([*others, asked], [free, mine, SamplingParams(temperature=0.0, **COMMON), free, mine], 4),
        ([asked, asked], [mine, mine], 1),
        ([others[0], asked], [seeded(0.4, max_tokens=2), mine], 1),
    ):
        assert generate(ours, batch, params)[place] == alone
