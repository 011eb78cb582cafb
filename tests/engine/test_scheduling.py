"""What vLLM's scheduler does around a tree: the text stays that of the run without speculation."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from driving import drive, watch_widths
from engines import GPU, accepted_length, counters, engine, generate, greedy, prompts, runner, tree
from oracle import oracle
from vllm import SamplingParams
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_ddtree import step
from vllm_ddtree.engine import config, graphs

TOKENS = 12
CASES = {
    "chunked prefill": {"max_num_batched_tokens": 136, "long_prefill_token_threshold": 34},
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
            assert counters(llm)["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("eager", [True, False] if GPU else [True])
@pytest.mark.parametrize("deriver", ["draw", "residual"])
def test_a_dummy_batch_leaves_the_trees_of_requests_alone(tiny, deriver, eager):
    """vLLM runs made-up requests 0, 1, ... beside live ones, where a rank of data parallelism idles and while
    it profiles. Their trees must not take the place of those that the next step verifies."""
    asked = {str(i): (prompt, greedy(TOKENS)) for i, prompt in enumerate(prompts(3, seed=5))}
    changed = []

    def run(llm, between_steps):
        llm.reset_prefix_cache()
        steps = []

        def after(step):
            steps.append(step)
            between_steps(llm)

        ends = drive(llm, asked, after)
        return len(steps), [list(ends[name].outputs[0].token_ids) for name in asked]

    def dummies(llm):
        work = runner(llm)
        stored = {name: value for name, value in vars(work.tree_store).items() if torch.is_tensor(value)}
        before = {name: tensor[:-1].clone() for name, tensor in stored.items()}
        llm.llm_engine.engine_core.execute_dummy_batch()
        work._dummy_run(3 * 21, uniform_decode=True)
        work._dummy_run(7)
        changed.extend(name for name, rows in before.items() if not torch.equal(stored[name][:-1], rows))

    with engine(tiny, tree(20, ddtree_deriver=deriver), enforce_eager=eager) as llm:
        alone = run(llm, lambda _llm: None)
        assert run(llm, dummies) == alone
    assert changed == []


def test_prefix_cache_hit_gives_the_same_text(tiny):
    asked = [prompts(1, seed=7)[0] * 40][0][:140]
    with engine(tiny, tree(33), block_size=32) as llm:
        first = generate(llm, [asked], greedy(TOKENS))
        again = generate(llm, [asked], greedy(TOKENS))
        assert counters(llm)["vllm:prefix_cache_hits"] > 0
    assert again == first


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
        ({"method": "ddtree"}, {9: 8, 8: 16, 4: 32, 1: 64}),
    ],
    ids=["named", "default"],
)
def test_fewer_nodes_as_requests_grow(tiny, speculative, expected):
    """vLLM's own key: the scheduler cuts drafts by batch size, and the first b nodes are the b-node tree."""
    batches = sorted(expected, reverse=True)
    asked = prompts(batches[0], seed=7)
    room = {"max_num_seqs": batches[0], "max_num_batched_tokens": 2048}
    with engine(tiny, **room) as llm:
        plain = generate(llm, asked, greedy(TOKENS))
    built = set()
    build = step.build_trees

    def building(logps, tokens, budgets, *rest):
        built.update((len(budgets), budget) for budget in budgets.tolist())
        build(logps, tokens, budgets, *rest)

    with engine(tiny, speculative, **room) as llm, mock.patch.object(step, "build_trees", building):
        widths = watch_widths(llm)
        with oracle([prompt + text for prompt, text in zip(asked, plain, strict=True)]):
            for count in batches:
                assert generate(llm, asked[:count], greedy(TOKENS)) == plain[:count]
            assert accepted_length(llm) > 1.5
    # For a step after it shrank, a batch has the nodes of the larger one.
    assert widths[batches[0]] == {expected[batches[0]]}, widths
    assert all(nodes in widths[count] for count, nodes in expected.items()), widths
    # No more nodes are built than are verified.
    assert all((count, nodes) in built for count, nodes in expected.items())
    assert all(budget == expected[count] for count, budget in built if count in expected), built


def graph_sizes(nodes, max_model_len=4096, **settings):
    compilation = SimpleNamespace(cudagraph_capture_sizes=None, max_cudagraph_capture_size=None)
    arguments = SimpleNamespace(
        compilation_config=compilation,
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        max_num_seqs=len(nodes) - 1,
    )
    vars(arguments).update(settings)
    graphs.set_sizes(arguments, nodes, 15, max_model_len)
    return arguments, arguments.compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize(
    ("schedule", "seqs"),
    [
        (None, 9),
        (None, 30),
        ([(1, 1, 64), (2, 4, 32), (5, 8, 16), (9, 64, 8)], 64),
        ([(1, 11, 64), (12, 32, 4)], 32),
        ([(1, 16, 32), (32, 64, 4)], 50),
        ([(1, 4, 6), (5, 9, 20)], 9),
    ],
)
def test_graphs_cover_every_batch(schedule, seqs):
    """Its own width, that of any larger batch before it shrank, and the drafter's, after vLLM's rounding."""
    spec = SimpleNamespace(num_speculative_tokens=64, num_speculative_tokens_per_batch_size=schedule)
    nodes = config.nodes_by_batch(spec, seqs)
    _, sizes = graph_sizes(nodes)
    widths = {1 + most for most in nodes[1:]} | {16}
    # vLLM rounds every size up to whole requests of every width, and captures what still fits.
    captured = {width: {-(-size // width) for size in sizes} for width in widths}
    limit = {width: [n for n in captured[width] if n <= seqs and n * width <= sizes[-1]] for width in widths}
    for count in range(1, seqs + 1):
        for width in {1 + most for most in nodes[count:]} | {16}:
            assert max(limit[width]) >= count, (count, width)


@pytest.mark.parametrize(
    ("schedule", "seqs"),
    [
        (None, 30),
        ([(1, 1, 64), (2, 4, 32), (5, 8, 16), (9, 64, 8)], 64),
        ([(1, 1, 64), (2, 4, 32), (5, 8, 16), (9, 64, 8)], 23),
        ([(1, 4, 6), (5, 9, 20)], 9),
        ([(1, 4, 20), (5, 9, 0)], 9),
    ],
)
def test_every_batch_finds_a_graph_and_every_graph_a_batch(schedule, seqs):
    """vLLM's own manager, less what needs a GPU."""
    spec = SpecDecodeView(64, schedule)
    nodes = config.nodes_by_batch(spec, seqs)
    manager = CudaGraphManager.__new__(CudaGraphManager)
    vars(manager).update(
        vllm_config=SimpleNamespace(speculative_config=spec, num_speculative_tokens=64, cache_config=NO_SSM),
        compilation_config=graph_sizes(nodes)[0].compilation_config,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_num_reqs=seqs,
        decode_query_len=65,
        lora_capture_cases=[0],
        _lora_dispatch_map={},
        varlen_decode=False,
        ubatch_runner=None,
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
    )
    manager.compilation_config.max_cudagraph_capture_size = max(
        manager.compilation_config.cudagraph_capture_sizes
    )
    manager._init_candidates()
    made = set(manager._capture_descs[CUDAGraphMode.FULL])
    graphs.keep_reachable(manager, nodes)
    captured = set(manager._capture_descs[CUDAGraphMode.FULL])
    met = set()
    for count in range(1, seqs + 1):
        for width in {1 + most for most in nodes[count:]}:
            desc = manager.dispatch(count, count * width, width, 0)
            assert desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count == width, (count, width)
            assert desc.num_reqs >= count
            met.add(desc)
    assert met == captured <= made
    mixed = manager.dispatch(2, 70, None, 0)
    assert mixed.cg_mode == CUDAGraphMode.PIECEWISE and mixed.num_tokens >= 70


class SpecDecodeView(SimpleNamespace):
    """What vLLM's graph manager reads of a SpeculativeConfig."""

    def __init__(self, most, schedule):
        super().__init__(num_speculative_tokens=most, num_speculative_tokens_per_batch_size=schedule)

    def uses_dynamic_speculative_decoding(self):
        return self.num_speculative_tokens_per_batch_size is not None


NO_SSM = SimpleNamespace(use_kda_recoverssm=False)


def test_the_users_graph_sizes_stay():
    nodes = [0] + [16] * 8
    arguments, sizes = graph_sizes(nodes, cudagraph_capture_sizes=[1, 5])
    assert sizes is None and arguments.cudagraph_capture_sizes == [1, 5]
    arguments, sizes = graph_sizes(nodes, max_cudagraph_capture_size=70)
    assert max(sizes) == 68 and arguments.max_cudagraph_capture_size is None
    again = list(sizes)
    graphs.set_sizes(arguments, [0] + [64] * 8, 15, 4096)
    assert arguments.compilation_config.cudagraph_capture_sizes == again


def test_no_graph_is_larger_than_any_batch():
    assert graph_sizes([0, 33], max_model_len=160)[1] == [1, 2, 4, 8, 16, 32, 34, 64, 128]


def test_the_schedule_in_words():
    assert config._schedule([64] * 4) == "64 (1-4 requests)"
    assert config._schedule([64, 64, 32, 0]) == "64 (1-2 requests), 32 (3), 0 (4)"
