"""Configurations off the beaten track: fewer nodes than the drafter's block, more requests than its rows."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from driving import drive, named, scheduler
from engines import GPU, SETTINGS, counters, engine, engines, generate, greedy, prompts, runner, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_adapter, make_drafter
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from vllm_ddtree.engine.proposer import TreeSpeculator

BLOCK = 16  # of the drafter: 15 tokens and the anchor
SIZE = 32  # of a KV block
# `vllm serve` without flags, on most machines.
SERVE = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 1024}


@pytest.fixture(scope="module")
def wide(tiny, tmp_path_factory):
    """The tiny target and a drafter with a block of 16, as public ones have."""
    return tiny[0], str(make_drafter(tmp_path_factory.mktemp("wide") / "drafter", block_size=BLOCK))


@pytest.fixture(scope="module")
def crowd(tiny):
    """256 short requests and their answers without speculation."""
    asked = [prompt[:2] for prompt in prompts(256, seed=3)]
    with engine(tiny, **SERVE) as llm:
        return asked, generate(llm, asked, greedy(3))


@pytest.mark.parametrize("nodes", [1, 3, 8, 15, 16, 64, 512, None])
def test_256_requests_at_once(wide, crowd, nodes):
    """The drafter has 256 x 16 rows where the target's steps have 2,048; all requests run, as without it."""
    asked, plain = crowd
    with engine(wide, tree(nodes) if nodes else {"method": "ddtree"}, **SERVE) as llm:
        running, drafted = [], []
        for i, prompt in enumerate(asked):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy(3))
        ends = {}
        while llm.llm_engine.has_unfinished_requests():
            ends |= {out.request_id: out for out in llm.llm_engine.step() if out.finished}
            running.append(len(scheduler(llm).running))
            drafted.append(counters(llm)["vllm:spec_decode_num_draft_tokens"])
    assert [list(ends[str(i)].outputs[0].token_ids) for i in range(256)] == plain
    assert max(running) == 256
    assert drafted[-1] > 0


@pytest.mark.parametrize("nodes", [1, 4, 15, 40])
def test_the_drafter_writes_only_slots_of_its_own_request(wide, nodes):
    """Contexts that end at every place of a cache block, prompts and verified requests in one batch."""
    asked = [(prompt * 10)[: SIZE - 6 + 2 * i] for i, prompt in enumerate(prompts(4, seed=5))]
    place, seen = {}, set()
    generate_draft = TreeSpeculator._generate_draft

    def generating(self, count, *args, **kwargs):
        slots = self.block_tables.slot_mappings[self.draft_kv_cache_group_id, : count * BLOCK]
        place["slots"] = slots.view(count, BLOCK).clone()
        return generate_draft(self, count, *args, **kwargs)

    def proposing(self, batch, *args, **kwargs):
        place["names"] = [named(name) for name in batch.req_ids]
        return propose(self, batch, *args, **kwargs)

    def look(_step):
        for request in scheduler(llm).running:
            if named(request.request_id) not in place.get("names", ()):
                continue
            slots = place["slots"][place["names"].index(named(request.request_id))]
            own = scheduler(llm).kv_cache_manager.get_block_ids(request.request_id)[-1]
            context = request.num_tokens - 1
            want = torch.arange(context, context + BLOCK)
            assert torch.equal(slots, torch.tensor(own)[want // SIZE] * SIZE + want % SIZE)
            seen.add(context % SIZE)

    propose = TreeSpeculator.propose
    options = {"async_scheduling": False, "block_size": SIZE, "num_gpu_blocks_override": 64}
    with (
        engine(wide, tree(nodes), **options) as llm,
        mock.patch.object(TreeSpeculator, "_generate_draft", generating),
        mock.patch.object(TreeSpeculator, "propose", proposing),
    ):
        drive(llm, {str(i): (prompt, greedy(SIZE)) for i, prompt in enumerate(asked)}, look)
    assert len(seen) >= SIZE - 8


def test_one_requests_drafts_do_not_depend_on_another(wide):
    """With fewer nodes than the drafter has rows, its keys landed in the blocks of other requests."""
    asked = [(prompt * 10)[: SIZE - 3 + 7 * i] for i, prompt in enumerate(prompts(2, seed=5))]

    def drafts(llm, names):
        found, order = {}, []
        propose = TreeSpeculator.propose

        def proposing(self, batch, *args, **kwargs):
            nodes = propose(self, batch, *args, **kwargs)
            for name, row in zip(batch.req_ids, nodes.tolist(), strict=True):
                found.setdefault(named(name), []).append(row)
            return nodes

        with mock.patch.object(TreeSpeculator, "propose", proposing):
            order = drive(llm, {name: (asked[int(name)], greedy(70)) for name in names})
        assert len(order) == len(names)
        return found

    options = {"async_scheduling": False, "block_size": SIZE, "enable_prefix_caching": False}
    with engine(wide, tree(4), **options) as llm:
        together = drafts(llm, ["0", "1"])
        for name in ("0", "1"):
            assert drafts(llm, [name])[name] == together[name]


def test_only_rows_of_accepted_tokens_go_into_the_drafter(wide):
    """A wide tree's other rows are left out; the drafts are those of the whole batch."""
    asked = prompts(3, seed=9)

    def run(llm):
        rows, found = [], []
        propose = TreeSpeculator.propose
        inner = TreeSpeculator.__mro__[1].propose

        def counting(self, batch, *args, **kwargs):
            rows.append((batch.num_reqs, batch.num_tokens))
            return inner(self, batch, *args, **kwargs)

        def proposing(self, batch, *args, **kwargs):
            nodes = propose(self, batch, *args, **kwargs)
            found.append(nodes.tolist())
            return nodes

        with (
            mock.patch.object(TreeSpeculator.__mro__[1], "propose", counting),
            mock.patch.object(TreeSpeculator, "propose", proposing),
        ):
            text = generate(llm, asked, greedy(12))
        return text, rows, found

    with engine(wide, tree(40), async_scheduling=False, enable_prefix_caching=False) as llm:
        text, rows, found = run(llm)
        assert (3, 3 * BLOCK) in rows
        with mock.patch("vllm_ddtree.engine.proposer._verified_width", return_value=0):
            plain_text, plain_rows, plain = run(llm)
    assert (3, 3 * 41) in plain_rows
    assert (text, found) == (plain_text, plain)


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.one_of(st.integers(1, 20), st.integers(1, 512), st.none()),
    seqs=st.integers(1, 1024),
    budget=st.integers(514, 16384),
    scheduled=st.one_of(st.none(), st.integers(514, 16384)),
)
def test_vllm_reads_our_sizes(wide, nodes, seqs, budget, scheduled):
    from vllm_ddtree.engine.config import step_sizes

    budget = max(budget, seqs, scheduled or 0)
    speculative = tree(nodes) if nodes else {"method": "ddtree"}
    room = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "max_num_scheduled_tokens": scheduled}
    args = EngineArgs(
        model=wide[0],
        speculative_config={**speculative, "model": wide[1]},
        **{key: value for key, value in SETTINGS.items() if key != "seed"} | {"max_model_len": 1024} | room,
    )
    for _ in range(2):  # a second time, since building the config must not change the arguments
        config = args.create_engine_config()
        sizes = step_sizes(config)
        assert config.num_lookahead_tokens == sizes.lookahead_slots == BLOCK
        assert config.scheduler_config.max_num_active_seqs is None
        assert config.speculative_config.max_num_new_slots_for_drafting == 0
        assert config.scheduler_config.max_num_batched_tokens == sizes.batched_tokens == budget
        assert config.scheduler_config.max_num_scheduled_tokens == sizes.scheduled_tokens
        assert sizes.scheduled_tokens == (scheduled or budget)
        assert sizes.max_num_seqs == seqs and sizes.horizon == BLOCK - 1


def test_sizes_of_a_chain_engine_stay_vllms(wide):
    args = EngineArgs(
        model=wide[0],
        speculative_config={"method": "dflash", "model": wide[1], "num_speculative_tokens": 15},
        **{key: value for key, value in SETTINGS.items() if key != "seed"},
    )
    assert args.create_engine_config().num_lookahead_tokens == 16
    plain = EngineArgs(model=wide[0], **{key: value for key, value in SETTINGS.items() if key != "seed"})
    assert plain.create_engine_config().num_lookahead_tokens == 0


def test_buffers_of_the_drafter_have_its_rows(wide):
    with engine(wide, tree(4), max_num_seqs=50, max_num_batched_tokens=128) as llm:
        speculator = runner(llm).speculator
        rows = 50 * BLOCK
        assert speculator.max_num_tokens == rows > runner(llm).max_num_tokens == 128
        assert speculator.input_buffers.input_ids.shape[0] == speculator.hidden_states.shape[0] == rows
        assert speculator.block_tables.slot_mappings.shape[1] == rows
        assert speculator._context_slot_mappings.shape[1] == rows
        text = generate(llm, prompts(60, seed=4), greedy(4))
    with engine(wide, max_num_seqs=50, max_num_batched_tokens=128) as llm:
        assert generate(llm, prompts(60, seed=4), greedy(4)) == text


def test_adapters_with_more_drafted_rows_than_a_step_has(wide, tmp_path):
    """The drafter shares the target's embedding and head, which adapters wrap with buffers of their own."""
    adapter = LoRARequest("one", 1, str(make_adapter(tmp_path / "one", seed=3)))
    asked = [{"prompt_token_ids": prompt[:5]} for prompt in prompts(60, seed=3)]
    adapters = [adapter if i % 2 else None for i in range(60)]
    room = {"max_num_seqs": 50, "max_num_batched_tokens": 256}
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} | ({"dtype": "float16"} if GPU else {})

    def texts(llm):
        outputs = llm.generate(asked, greedy(5), lora_request=adapters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with engines(wide, tree(4), **room, **lora) as (plain, ours):
        assert 50 * BLOCK > 256
        assert texts(ours) == texts(plain)
