"""What the drafter is given: its input block, and its context after a prefix-cache hit."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from driving import VLLM_0_32, drive, named, runner, scheduler
from engines import accepted_length, counters, engine, generate, greedy, prompts, tree
from oracle import oracle
from tiny_models import BLOCK, MASK

from vllm_ddtree.engine.proposer import TreeSpeculator

TOKENS = 20
SIZE = 32  # of a KV block
SETTINGS = {"async_scheduling": False, "block_size": SIZE, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def llm(tiny):
    with engine(tiny, tree(24), **SETTINGS) as made:
        yield made


def test_the_input_block_is_the_anchor_and_masks_behind_the_context(llm):
    """[anchor, mask x L] at the positions context .. context + L, each in the slot of its position."""
    asked = {str(i): (prompt, greedy(TOKENS)) for i, prompt in enumerate(prompts(3, seed=5))}
    ends = drive(llm, asked)
    known = [asked[name][0] + list(ends[name].outputs[0].token_ids) for name in sorted(asked)]
    blocks, checked, grown = {}, [], {}
    propose, generate = TreeSpeculator.propose, TreeSpeculator._generate_draft

    def proposing(self, batch, *args, **kwargs):
        blocks["names"] = [named(name) for name in batch.req_ids]
        return propose(self, batch, *args, **kwargs)

    def generating(self, count, *args, **kwargs):
        rows = count * BLOCK
        buffers, group = self.input_buffers, self.draft_kv_cache_group_id
        blocks["ids"] = buffers.input_ids[:rows].view(count, BLOCK).tolist()
        blocks["positions"] = buffers.positions[:rows].view(count, BLOCK).tolist()
        blocks["slots"] = self.block_tables.slot_mappings[group, :rows].view(count, BLOCK).tolist()
        blocks["lengths"] = buffers.seq_lens[:count].tolist()
        blocks["starts"] = buffers.query_start_loc[: count + 1].tolist()
        return generate(self, count, *args, **kwargs)

    def look(_step):
        group = runner(llm).speculator.draft_kv_cache_group_id
        assert blocks["starts"] == [row * BLOCK for row in range(len(blocks["names"]) + 1)]
        for request in scheduler(llm).running:
            row, context = blocks["names"].index(named(request.request_id)), request.num_tokens - 1
            positions = list(range(context, context + BLOCK))
            own = scheduler(llm).kv_cache_manager.get_block_ids(request.request_id)[group]
            assert blocks["ids"][row] == [request.all_token_ids[-1]] + [MASK] * (BLOCK - 1)
            assert blocks["positions"][row] == positions
            assert blocks["slots"][row] == [own[at // SIZE] * SIZE + at % SIZE for at in positions]
            assert blocks["lengths"][row] == context + BLOCK
            checked.append(context)
            grown.setdefault(named(request.request_id), []).append(context)

    with (
        oracle(known, (0, 0, 0, 2, 1, 3, 0)),
        mock.patch.object(TreeSpeculator, "propose", proposing),
        mock.patch.object(TreeSpeculator, "_generate_draft", generating),
    ):
        drive(llm, asked, look)
    steps = {b - a for contexts in grown.values() for a, b in itertools.pairwise(contexts)}
    # Paths of several lengths, and blocks on both sides of a border between KV blocks.
    assert len(steps) >= 3 and len(checked) > 10
    assert any(context // SIZE != (context + BLOCK - 1) // SIZE for context in checked)


def drafts(llm, prompt, tokens=TOKENS):
    """The answer to a prompt, the drafts of every step, drafts accepted, and tokens found in the cache."""
    propose, drafted = TreeSpeculator.propose, []

    def proposing(self, *args, **kwargs):
        nodes = propose(self, *args, **kwargs)
        drafted.append(nodes[0].tolist())
        return nodes

    before = counters(llm)
    with mock.patch.object(TreeSpeculator, "propose", proposing):
        output = drive(llm, {"one": (prompt, greedy(tokens))})["one"]
    after = counters(llm)
    accepted, hits = (
        after[name] - before[name]
        for name in ("vllm:spec_decode_num_accepted_tokens", "vllm:prefix_cache_hits")
    )
    return list(output.outputs[0].token_ids), drafted, accepted, hits


def test_a_prefix_cache_hit_changes_no_draft(llm):
    """vllm#47930: acceptance fell after a hit. The drafter's context rows must be there as well."""
    prompt = (prompts(1, seed=7)[0] * 40)[:70]
    llm.reset_prefix_cache()
    *first, missed = drafts(llm, prompt, 80)
    *again, found = drafts(llm, prompt, 80)
    assert again == first and first[2] > 0
    assert (missed, found) == (0, 64)  # those in whole blocks

    # A conversation that goes on: the hit covers rows which accepted paths left behind.
    longer = prompt + first[0] + prompts(1, seed=8)[0]
    *hit, found = drafts(llm, longer)
    assert found == (len(prompt) + 80 - 1) // SIZE * SIZE > len(prompt)
    llm.reset_prefix_cache()
    *fresh, missed = drafts(llm, longer)
    assert hit == fresh
    assert missed == 0

    # Without the drafter's rows, the drafts would be others.
    for name in runner(llm).speculator.draft_attn_layer_names:
        runner(llm).compilation_config.static_forward_context[name].kv_cache.zero_()
    text, spoilt, *_ = drafts(llm, longer)
    assert text == fresh[0] and spoilt != fresh[1]


def test_a_hit_in_the_step_that_computes_it_changes_no_draft(llm):
    """Two requests with one prompt join at once: the second finds blocks that the first is still writing."""
    prompt = (prompts(1, seed=7)[0] * 40)[:70]
    llm.reset_prefix_cache()
    alone, fresh, *_ = drafts(llm, prompt)
    llm.reset_prefix_cache()
    propose, drafted = TreeSpeculator.propose, {"0": [], "1": []}

    def proposing(self, batch, *args, **kwargs):
        nodes = propose(self, batch, *args, **kwargs)
        for name, row in zip(batch.req_ids, nodes.tolist(), strict=True):
            drafted[named(name)].append(row)
        return nodes

    before = counters(llm)["vllm:prefix_cache_hits"]
    with mock.patch.object(TreeSpeculator, "propose", proposing):
        ends = drive(llm, {name: (prompt, greedy(TOKENS)) for name in drafted})
    assert counters(llm)["vllm:prefix_cache_hits"] - before == 64
    assert all(list(end.outputs[0].token_ids) == alone for end in ends.values())
    assert drafted == {"0": fresh, "1": fresh}


def turns(llm, count=5):
    """Tokens found in the cache at every turn of a chat, and the whole chat."""
    chat, found = prompts(1, seed=7)[0][:12], []
    for turn in range(count):
        output = drive(llm, {"one": (chat, greedy(TOKENS))})["one"]
        found.append(output.num_cached_tokens)
        chat = chat + list(output.outputs[0].token_ids) + [65 + turn] * 12
    return found, chat


def test_a_chat_finds_as_much_in_the_cache_as_without_speculation(tiny, llm):
    """vLLM 0.32 leaves a block out with every drafter that reads hidden states, stock DFlash included."""
    llm.reset_prefix_cache()
    found, chat = turns(llm)
    with engine(tiny, **SETTINGS) as plain:
        assert turns(plain) == (found, chat)
    assert sorted(found) == found and len(set(found)) >= 4
    with engine(tiny, {"method": "dflash", "num_speculative_tokens": BLOCK - 1}, **SETTINGS) as stock:
        less, same = turns(stock)
    assert same == chat
    assert less == [max(tokens - (SIZE if VLLM_0_32 else 0), 0) for tokens in found]


@pytest.mark.parametrize("outer", [{}, {"block_size": None}], ids=["absent", "null"])
def test_a_block_size_that_stands_in_dflash_config_only(tiny, tmp_path, outer):
    asked, drafter = prompts(2, seed=9), tmp_path / "drafter"
    shutil.copytree(tiny[1], drafter)
    file = Path(drafter, "config.json")
    config = json.loads(file.read_text())
    config["dflash_config"]["block_size"] = config.pop("block_size")
    file.write_text(json.dumps(config | outer))
    with engine(tiny) as plain:
        answers = generate(plain, asked, greedy(10))
    with engine((tiny[0], str(drafter)), tree(24)) as made:
        assert runner(made).speculator.horizon == BLOCK - 1
        assert generate(made, asked, greedy(10)) == answers
        assert accepted_length(made) > 1
