"""What vLLM's scheduler does around a tree: the text stays that of the run without speculation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engines import accepted_length, engine, generate, greedy, prompts, runner, tree
from oracle import oracle
from vllm import SamplingParams

from vllm_ddtree.engine import config

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


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        (tree(16, num_speculative_tokens_per_batch_size=[(1, 1, 16), (2, 3, 6), (4, 4, 4)]), {4: 4, 1: 16}),
        ({"method": "ddtree"}, {4: 32, 1: 64}),
    ],
    ids=["named", "default"],
)
def test_fewer_nodes_as_requests_grow(tiny, speculative, expected):
    """vLLM's own key: the scheduler cuts drafts by batch size, and the first b nodes are the b-node tree."""
    asked = prompts(4, seed=7)
    with engine(tiny) as llm:
        plain = generate(llm, asked, greedy(TOKENS))
    with engine(tiny, speculative) as llm:
        widths = {}
        prepare = runner(llm).prepare_attn

        def watched(batch):
            if batch.num_draft_tokens:
                drafts = batch.num_draft_tokens // batch.num_reqs
                widths.setdefault(batch.num_reqs, set()).add(drafts)
            return prepare(batch)

        runner(llm).prepare_attn = watched
        with oracle([prompt + text for prompt, text in zip(asked, plain, strict=True)]):
            assert generate(llm, asked, greedy(TOKENS)) == plain
            assert accepted_length(llm) > 1.5
            assert generate(llm, asked[:1], greedy(TOKENS)) == plain[:1]
    assert widths[4] == {expected[4]} and expected[1] in widths[1], widths


def test_graphs_cover_every_width():
    arguments = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=None),
        cudagraph_capture_sizes=None,
        max_num_seqs=8,
    )
    config._set_graph_sizes(arguments, 4096, 64, [(1, 2, 64), (3, 8, 16)])
    sizes = set(arguments.compilation_config.cudagraph_capture_sizes)
    # A batch that shrinks to two requests has the nodes of the tier above for a step.
    assert sizes >= {65, 130} | {17 * n for n in range(1, 9)}
    assert max(sizes - {256, 512}) == 17 * 8
    before = list(sizes)
    config._set_graph_sizes(arguments, 4096, 16)
    assert set(arguments.compilation_config.cudagraph_capture_sizes) == set(before), "the user's sizes stay"


def test_no_graph_is_larger_than_any_batch():
    compilation = SimpleNamespace(cudagraph_capture_sizes=None)
    arguments = SimpleNamespace(compilation_config=compilation, cudagraph_capture_sizes=None, max_num_seqs=1)
    config._set_graph_sizes(arguments, 160, 33)
    assert arguments.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8, 16, 32, 34, 64, 128]


@pytest.mark.parametrize(
    ("tiers", "budget", "rows"),
    [
        (None, 8192, 8 * 65),
        (None, 300, 300),
        ([(1, 2, 64), (3, 8, 6)], 8192, 2 * 65),
        ([(1, 2, 64), (3, 8, 20)], 8192, 8 * 21),
    ],
)
def test_rows_of_a_full_step(tiers, budget, rows):
    """What memory profiling counts; beyond a tier's end its nodes hold on, as in vLLM's scheduler."""
    found = config.verification_rows(
        SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=budget),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=64, num_speculative_tokens_per_batch_size=tiers
            ),
        )
    )
    assert found == rows


def test_the_schedule_in_words():
    assert config._schedule([n * 65 for n in range(5)]) == "64 (1-4 requests)"
    rows = [n * (nodes + 1) for n, nodes in enumerate([0, 64, 64, 32, 0])]
    assert config._schedule(rows) == "64 (1-2 requests), 32 (3), 0 (4)"
