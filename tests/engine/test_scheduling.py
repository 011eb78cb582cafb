"""What vLLM's scheduler does around a tree: the text stays that of the run without speculation."""

from __future__ import annotations

import pytest
from engines import engine, generate, greedy, prompts, tree
from oracle import oracle
from vllm import SamplingParams

TOKENS = 12
CASES = {
    "chunked prefill": {"max_num_batched_tokens": 136, "long_prefill_token_threshold": 16},
    "async scheduling": {"async_scheduling": True},
    "no async scheduling": {"async_scheduling": False},
    "preemption": {"num_gpu_blocks_override": 6, "max_model_len": 128, "block_size": 32},
}


def long_prompts():
    asked = prompts(5, seed=3)
    return [(p * 20)[: 30 + 12 * i] for i, p in enumerate(asked)]


@pytest.fixture(scope="module")
def plain(tiny):
    with engine(tiny) as llm:
        return generate(llm, long_prompts(), greedy(TOKENS))


@pytest.mark.parametrize("case", CASES)
def test_text_is_unchanged(tiny, plain, case):
    with engine(tiny, tree(33), **CASES[case]) as llm:
        assert generate(llm, long_prompts(), greedy(TOKENS)) == plain
        if case == "preemption":
            values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
            assert values["vllm:num_preemptions"] > 0


def test_prefix_cache_hit_gives_the_same_text(tiny):
    asked = [prompts(1, seed=7)[0] * 40][0][:140]
    with engine(tiny, tree(33), block_size=32) as llm:
        first = generate(llm, [asked], greedy(TOKENS))
        again = generate(llm, [asked], greedy(TOKENS))
        values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    assert again == first
    assert values["vllm:prefix_cache_hits"] > 0


@pytest.mark.parametrize("nodes", [16])
def test_lengths_up_to_the_model_limit(tiny, nodes):
    limit = 96
    asked = [prompts(1, seed=11)[0] * 10][0]
    asked = [asked[: limit - left] for left in (1, 2, 5, nodes, nodes + 2)]
    with engine(tiny, max_model_len=limit) as llm:
        plain = generate(llm, asked, greedy(limit))
    with engine(tiny, tree(nodes), max_model_len=limit) as llm:
        assert generate(llm, asked, greedy(limit)) == plain


def test_stop_at_every_offset_of_an_accepted_path(tiny):
    asked = prompts(1, seed=21)
    with engine(tiny) as llm:
        plain = generate(llm, asked, greedy(16))
    with oracle([asked[0] + plain[0]]), engine(tiny, tree(40)) as llm:
        for length in range(1, 9):
            assert generate(llm, asked, greedy(length)) == [plain[0][:length]]
        stop = plain[0][5]
        at = plain[0].index(stop)
        ended = llm.generate(
            {"prompt_token_ids": asked[0]},
            SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[stop]),
            use_tqdm=False,
        )[0].outputs[0]
        assert (list(ended.token_ids), ended.finish_reason) == (plain[0][: at + 1], "stop")
