"""What a commit leaves behind: rows of a fresh prefill, and the scheduler's counts of no speculation."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from driving import VLLM_0_32, drive, free_blocks, named, runner, scheduler, target_rows
from engines import engine, generate, greedy, prompts, tree
from oracle import oracle
from transformers import AutoModelForCausalLM
from vllm.v1.core.sched.scheduler import Scheduler

TOKENS = 54
BLOCK = 32  # the smallest that vLLM's CPU cache takes
# Which choice of the drafter is right, by position: paths of many lengths, over first and later siblings.
RANKS = (0, 0, 0, 0, 0, 3, 2, 2, 3, 1, 3)
SETTINGS = {"async_scheduling": False, "block_size": BLOCK, "num_gpu_blocks_override": 64}
LENGTHS = range(1, 7)
# Float32 sums in another order: the largest difference seen here is 4e-6.
CLOSE = {"rtol": 0, "atol": 3e-5}


@pytest.fixture(scope="module")
def case(tiny):
    """Prompts, their answers without speculation, and what its scheduler knew at every end."""
    text = [token for prompt in prompts(9, seed=5) for token in prompt]
    asked = [text[:14], text[20:44], text[50:96]]
    with engine(tiny, **SETTINGS) as llm:
        answers = generate(llm, asked, greedy(TOKENS))
        return asked, answers, ends_per_length(llm, asked)


@pytest.fixture(scope="module")
def ours(tiny, case):
    """A tree engine whose drafter knows the answers behind wrong siblings."""
    known = oracle([p + a for p, a in zip(*case[:2], strict=True)], RANKS)
    with known, engine(tiny, tree(40), **SETTINGS) as llm:
        yield llm


def requests(asked, tokens=TOKENS):
    return {str(i): (prompt, greedy(tokens)) for i, prompt in enumerate(asked)}


def texts(outputs):
    return [list(outputs[str(i)].outputs[0].token_ids) for i in range(len(outputs))]


def plain_rows(target, text):
    """Keys and values of a text by transformers, one [tokens, heads, K|V] per layer."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.tensor([text]), use_cache=True).past_key_values
    return [
        torch.cat((layer.keys[0], layer.values[0]), dim=-1).transpose(0, 1).contiguous()
        for layer in cache.layers
    ]


def fresh_rows(llm, text):
    """Rows that prefilling a whole text leaves, in the same engine."""
    rows = {}

    def look(step):
        if step == 1:
            (request,) = scheduler(llm).running
            blocks = scheduler(llm).kv_cache_manager.get_block_ids(request.request_id)[0]
            rows.update(target_rows(llm, blocks, len(text)))

    drive(llm, {"fresh": (text, greedy(2))}, look)
    return rows


def test_rows_after_every_step_are_those_of_a_fresh_prefill(tiny, case, ours):
    asked, answers, _ = case
    seen, grown, lengths = [], [], {}

    def look(_step):
        work = runner(ours)
        for request in scheduler(ours).running:
            count, name = request.num_computed_tokens, named(request.request_id)
            assert count == request.num_tokens - 1
            index = work.req_states.req_id_to_index[request.request_id]
            assert int(work.req_states.num_computed_tokens.gpu[index]) == count
            blocks = scheduler(ours).kv_cache_manager.get_block_ids(request.request_id)[0]
            seen.append((name, target_rows(ours, blocks, count)))
            grown.append(count - lengths.get(name, count))
            lengths[name] = count

    assert texts(drive(ours, requests(asked), look)) == answers
    assert len(set(grown)) >= 4 and max(grown) >= 5, grown
    whole = {}
    for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        assert ours.reset_prefix_cache()
        whole[str(i)] = fresh_rows(ours, prompt + answer), plain_rows(tiny[0], prompt + answer)
    for name, layers in seen:
        fresh, plain = whole[name]
        assert len(layers) == len(plain) == 3
        for (layer, rows), independent in zip(layers.items(), plain, strict=True):
            torch.testing.assert_close(rows, fresh[layer][: len(rows)], **CLOSE)
            torch.testing.assert_close(rows, independent[: len(rows)], **CLOSE)


def watch_ends(ends):
    """Record what the scheduler knows of each request just before it frees it."""
    free, update = Scheduler._free_request, Scheduler.update_from_output
    emitted = {}

    def updating(self, scheduled, output):
        for name, index in output.req_id_to_index.items():
            request = self.requests.get(name)
            if request is not None and output.sampled_token_ids:
                emitted[name] = (request.num_output_tokens, len(output.sampled_token_ids[index]))
        return update(self, scheduled, output)

    def freeing(self, request, *args, **kwargs):
        before, count = emitted[request.request_id]
        # Tokens of the last accepted path that lie after the stop: their rows were computed, nothing else.
        dropped = before + count - request.num_output_tokens
        blocks = self.kv_cache_manager.get_block_ids(request.request_id)[0]
        ends[named(request.request_id)] = {
            "output": request.num_output_tokens,
            "computed": request.num_computed_tokens - (dropped if VLLM_0_32 else 0),
            "dropped": dropped,
            "blocks": len(blocks),
        }
        return free(self, request, *args, **kwargs)

    return (
        mock.patch.object(Scheduler, "_free_request", freeing),
        mock.patch.object(Scheduler, "update_from_output", updating),
    )


def ends_per_length(llm, asked):
    """What the scheduler knew at the end of every request, and whole cached blocks, per max_tokens."""
    ends, found = {}, []
    free, update = watch_ends(ends)
    with free, update:
        for tokens in LENGTHS:
            assert llm.reset_prefix_cache()
            ends.clear()
            drive(llm, requests(asked, tokens))
            cached = len(scheduler(llm).kv_cache_manager.block_pool.cached_block_hash_to_block)
            found.append((dict(ends), cached))
            unused, total = free_blocks(llm)
            assert unused == total
            assert not scheduler(llm).requests
    return found


def test_counts_at_the_end_are_those_of_no_speculation(case, ours):
    """The stop falls on every offset of an accepted path."""
    asked, _, without = case
    dropped = 0
    for (plain, plain_cached), (mine, my_cached) in zip(without, ends_per_length(ours, asked), strict=True):
        # Only whole blocks of emitted tokens enter the prefix cache.
        most = plain_cached if VLLM_0_32 else plain_cached - len(asked)  # a block per request later
        assert most <= my_cached <= plain_cached
        assert mine.keys() == plain.keys() == {"0", "1", "2"}
        for name in plain:
            assert mine[name]["output"] == plain[name]["output"]
            assert mine[name]["computed"] == plain[name]["computed"]
            # vLLM reserves rows for a step's drafts and for drafting the next: at most 41 + 40 more.
            assert 0 <= mine[name]["blocks"] - plain[name]["blocks"] <= -(-81 // BLOCK)
            dropped += mine[name]["dropped"]
    assert dropped > 0


def test_a_second_request_on_cached_blocks_is_right(case, ours):
    """The prefix cache serves rows that commits moved: same text, and really hit."""
    asked, answers, _ = case
    assert ours.reset_prefix_cache()
    drive(ours, requests(asked))
    longer = [p + a[:-2] for p, a in zip(asked, answers, strict=True)]
    outputs = drive(ours, requests(longer, 2))
    assert texts(outputs) == [answer[-2:] for answer in answers]
    hits = [outputs[str(i)].num_cached_tokens for i in range(3)]
    assert hits == [(len(text) - 1) // BLOCK * BLOCK for text in longer]
    assert any(hit > len(p) for hit, p in zip(hits, asked, strict=True))
