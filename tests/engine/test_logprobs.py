"""Log-probabilities of emitted and prompt tokens: values, ranks and order of the run without speculation."""

from __future__ import annotations

import pytest
from engines import engines, prompts, runner, tree
from oracle import oracle
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

TOKENS = 6
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# What the logits modes add is one switch in vLLM's code that picks the score.
RUNS = [*MODES[:2], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[2:])]


@pytest.fixture(scope="module")
def llms(tiny):
    with engines(tiny, tree(40), max_num_seqs=6, max_num_batched_tokens=1024, max_logprobs=-1) as both:
        yield both


def requests():
    """Counts 0, 5 and all of the vocabulary; greedy, sampled and processed; trees and chains."""
    common = {"max_tokens": TOKENS, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.0, logprobs=0, **common),
        SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=2, **common),
        SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=-1, **common),
        SamplingParams(temperature=0.8, seed=7, top_k=30, logprobs=3, prompt_logprobs=0, **common),
        SamplingParams(temperature=0.0, frequency_penalty=0.7, logit_bias={70: 2.0}, logprobs=4, **common),
        SamplingParams(temperature=1.0, seed=8, **common),
    ]


def results(llm, asked, params):
    inputs = [{"prompt_token_ids": p} for p in asked]
    return llm.generate(inputs, params, use_tqdm=False)


def set_mode(llm, mode):
    """The engine-wide ``logprobs_mode``, which the sampler and the prompt's worker copy at start."""
    ours = runner(llm)
    for owner in (ours.sampler, ours.prompt_logprobs_worker):
        assert owner.logprobs_mode in MODES
        owner.logprobs_mode = mode


def assert_same(theirs, mine):
    assert (mine is None) == (theirs is None)
    for left, right in zip(theirs or (), mine or (), strict=True):
        assert (left is None) == (right is None)
        if left is None:
            continue
        assert right.keys() == left.keys()
        for token, entry in left.items():
            assert right[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert right[token].rank == entry.rank


@pytest.mark.parametrize("mode", RUNS)
def test_values_follow_the_path(llms, mode):
    asked, params = prompts(6, seed=61), requests()
    for llm in llms:
        set_mode(llm, mode)
    plain = results(llms[0], asked, params)
    with oracle([p + list(o.outputs[0].token_ids) for p, o in zip(asked, plain, strict=True)]):
        ours = results(llms[1], asked, params)
    for theirs, mine in zip(plain, ours, strict=True):
        (left,), (right,) = theirs.outputs, mine.outputs
        assert right.token_ids == left.token_ids
        assert_same(theirs.prompt_logprobs, mine.prompt_logprobs)
        assert_same(left.logprobs, right.logprobs)
        if left.cumulative_logprob is None:
            assert right.cumulative_logprob is None
        else:
            assert right.cumulative_logprob == pytest.approx(left.cumulative_logprob, abs=1e-3)


def test_prompt_scores_of_given_tokens(llms):
    (prompt,) = prompts(1, seed=62)
    ids = [[65 + row % 20, 66 if row % 3 else -1] for row in range(len(prompt) - 2)]
    params = SamplingParams(
        temperature=0.0, max_tokens=2, prompt_logprob_token_ids=ids, prompt_logprob_start=1
    )
    plain, ours = (results(llm, [prompt], params)[0] for llm in llms)
    assert plain.outputs[0].token_ids == ours.outputs[0].token_ids
    assert ours.prompt_token_id_logprobs == pytest.approx(plain.prompt_token_id_logprobs, abs=1e-4)


def test_scores_of_given_output_tokens_are_refused(llms):
    params = SamplingParams(max_tokens=2, logprob_token_ids=[65, 66])
    with pytest.raises(VLLMValidationError, match="Ask for logprobs=N"):
        results(llms[1], prompts(1), [params])


def test_flat_logprobs(llms):
    (prompt,) = prompts(1, seed=63)
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, flat_logprobs=True)
    plain, ours = (results(llm, [prompt], params)[0].outputs[0].logprobs for llm in llms)
    assert ours.token_ids == plain.token_ids
    assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
