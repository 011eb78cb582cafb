"""The other derivers in the real engine: greedy text of no speculation, seeded text that repeats itself, and
what they sample against the exact distribution."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from engines import GPU, accepted_length, engine, generate, greedy, prompts, tree
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_ddtree.engine.proposer import TreeSpeculator
from vllm_ddtree.engine.scorer import TreeScorer

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

    Two sums over the answers against their exact mean and variance given what came before, which tokens of
    the drafter alone would lower. False-alarm rate below 1e-6 each.
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
            judge([answer[length] for answer in answers], rows)


def judge(tokens, rows):
    """Log-probability and probability of what was said, summed, against their exact mean and variance."""
    for value in (math.log, lambda p: p):
        said, mean, variance = 0.0, 0.0, 0.0
        for token, row in zip(tokens, rows, strict=True):
            expected = sum(p * value(p) for p in row.values() if p > 0)
            said += value(row[token])
            mean += expected
            variance += sum(p * value(p) ** 2 for p in row.values() if p > 0) - expected**2
        assert abs(said - mean) < SIGMAS * math.sqrt(variance), (said, mean, variance**0.5)


def test_a_request_padded_with_placeholders_samples_the_targets(tiny):
    """The first token of 600 prompts of one token, which join a running request: vLLM pads them with drafts
    that nobody drew, and their trees are those of requests before them. Judged as above."""
    requests, verify, padded = 600, TreeScorer._verify, []

    def watching(self, logits, draft_logits, draft_sampled, *rest):
        padded.append(int((draft_sampled < 0).sum()))
        return verify(self, logits, draft_logits, draft_sampled, *rest)

    with (
        mock.patch.object(TreeScorer, "_verify", watching),
        engine(tiny, tree(16, ddtree_deriver="residual"), **WIDE) as llm,
    ):
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=1) for i in range(requests)]
        asked = [prompts(1, seed=3)[0], *[[65]] * requests]
        answers = generate(llm, asked, [greedy(100), *params])[1:]
    assert sum(padded) > 200 * 16
    with engine(tiny, max_logprobs=-1, **WIDE) as llm:
        (row,) = distributions(llm, [[65]])
    judge([answer[0] for answer in answers], [row] * requests)


@pytest.mark.parametrize("overlapped", [False, True] if GPU else [False])  # vLLM switches it off on a CPU
def test_drafts_that_a_grammar_rules_out_were_drawn(tiny, overlapped):
    """Chains under [A-D]{5}, drafted A or Z with one half each: the second to fifth tokens of 250 answers.

    A Z must leave its half of the target to the others. Without async scheduling vLLM cuts a draft at its
    first token that the grammar refuses, as if nobody had drawn it, and A would be said with up to 1.5 times
    its probability. 5 standard deviations, a false-alarm rate below 1e-6.
    """
    requests, heat, build = 250, 2.0, TreeSpeculator._build
    prompt = prompts(1, seed=3)[0]

    def drafting(self, num_reqs, logits):
        build(self, num_reqs, peaked.to(logits).expand_as(logits))

    speculative = tree(5, ddtree_deriver="residual", ddtree_grammar="chain")
    with (
        mock.patch.object(TreeSpeculator, "_build", drafting),
        engine(tiny, speculative, async_scheduling=overlapped, **WIDE) as llm,
    ):
        encode = llm.get_tokenizer().encode
        letters = [encode(letter, add_special_tokens=False)[0] for letter in "ABCDZ"]
        peaked = torch.full((272,), -1000.0)
        peaked[[letters[0], letters.pop()]] = 0.0
        rule = StructuredOutputsParams(regex="[A-D]{5}")
        params = [
            SamplingParams(temperature=heat, seed=i, max_tokens=5, structured_outputs=rule)
            for i in range(requests)
        ]
        answers = generate(llm, [prompt] * requests, params)
    with engine(tiny, max_logprobs=-1, **WIDE) as llm:
        said = expected = variance = 0.0
        for length in range(1, 5):
            rows = distributions(llm, [prompt + answer[:length] for answer in answers])
            for answer, row in zip(answers, rows, strict=True):
                weights = [row[letter] ** (1 / heat) for letter in letters]
                chance = weights[0] / sum(weights)
                said += answer[length] == letters[0]
                expected += chance
                variance += chance * (1 - chance)
    assert abs(said - expected) < SIGMAS * math.sqrt(variance), (said, expected, variance**0.5)
