"""Whatever the configuration and whatever the scheduler makes of it, what is written fits into what is there.

The scheduler's rules are modelled here (a token budget, a number of requests, blocks for the rows and a
lookahead); that vLLM really reads these sizes is tested in tests/engine/test_configurations.py.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ddtree.sizes import HEAD_ROWS, StepSizes


@st.composite
def sizes(draw):
    horizon = draw(st.integers(1, 31))
    seqs = draw(st.one_of(st.integers(1, 8), st.integers(1, 1024)))
    most = draw(st.integers(1, 512))
    tiers = draw(st.lists(st.tuples(st.integers(1, seqs), st.integers(0, most)), max_size=4))
    nodes = [0] + [most] * seqs
    for begin, count in sorted(tiers):
        nodes[begin:] = [count] * (seqs + 1 - begin)
    nodes[draw(st.integers(1, seqs))] = most
    batched = draw(st.integers(most + 1, 16384))
    return StepSizes(
        nodes=tuple(nodes),
        horizon=horizon,
        max_depth=draw(st.integers(1, horizon)),
        batched_tokens=batched,
        scheduled_tokens=draw(st.integers(most + 1, batched)),
    )


def some_step(sizes, draw):
    """A step that the scheduler may make: (context, rows, drafts among them, accepted) of each request.

    A request holds the drafts of whatever step it was last in, so any number up to the largest tree.
    """
    left, requests = sizes.scheduled_tokens, []
    wide = draw.random() < 0.5
    while left and len(requests) < sizes.max_num_seqs:
        if draw.random() < 0.3:
            rows, drafts = draw.randint(1, min(left, 300)), 0
        else:
            most = min(left - 1, sizes.most_nodes)
            drafts = most if wide else draw.randint(0, most)
            rows = drafts + 1
        deepest = min(drafts, sizes.max_depth)
        accepted = draw.choice((0, deepest, draw.randint(0, deepest)))
        requests.append((draw.randint(0, 5000), rows, drafts, accepted))
        left -= rows
    return requests


@settings(max_examples=300, deadline=None)
@given(sizes(), st.integers(0, 2**32))
def test_rows_of_any_step_fit(sizes, seed):
    for requests in (some_step(sizes, random.Random(seed + i)) for i in range(4)):
        rows = sum(rows for _, rows, _, _ in requests)
        assert rows <= sizes.batched_tokens <= sizes.drafter_rows
        assert len(requests) * sizes.draft_rows <= sizes.drafter_rows
        assert sum(drafts + 1 for _, _, drafts, _ in requests) <= sizes.logits_rows


@settings(max_examples=300, deadline=None)
@given(sizes(), st.integers(0, 2**32), st.sampled_from((1, 8, 16, 32, 64, 128)))
def test_slots_of_any_step_are_reserved(sizes, seed, block):
    for context, rows, drafts, accepted in some_step(sizes, random.Random(seed)):
        reserved = -(-(context + rows + sizes.lookahead_slots) // block) * block
        last = context + accepted if drafts else context + rows - 1
        drafted = range(last + 1, last + 1 + sizes.draft_rows)
        assert context + rows - 1 < reserved
        assert drafted[-1] < reserved
        # No slot too many, in the worst case: a prompt, or a path as long as the drafts.
        if not drafts or accepted == drafts:
            assert drafted[-1] == context + rows + sizes.lookahead_slots - 1


@settings(max_examples=300, deadline=None)
@given(sizes())
def test_what_is_profiled_holds_what_comes(sizes):
    # vLLM's warm-up verifies full trees of as many requests as prompts of one token more fit.
    warm = min(sizes.max_num_seqs, sizes.batched_tokens // (sizes.most_nodes + 2))
    assert warm * (sizes.most_nodes + 1) <= sizes.logits_rows
    # Its memory profile drafts for as many requests as blocks fit into a step.
    profiled = max(1, min(sizes.max_num_seqs, sizes.batched_tokens // sizes.draft_rows))
    at_once = min(sizes.head_requests, sizes.max_num_seqs)
    assert at_once <= profiled
    assert at_once * sizes.horizon <= max(HEAD_ROWS, sizes.horizon)


@settings(max_examples=200, deadline=None)
@given(sizes())
def test_rows_of_the_drafters_graphs(sizes):
    rows = [sizes.context_rows(n) for n in range(sizes.max_num_seqs + 1)]
    assert rows == sorted(rows) and rows[-1] <= sizes.drafter_rows
    for count in range(1, sizes.max_num_seqs + 1):
        # A verified batch goes in as a whole, less what can't be accepted.
        assert rows[count] >= count * min(sizes.accepted_rows, sizes.nodes[count] + 1)


@settings(max_examples=200, deadline=None)
@given(sizes())
def test_requests_at_once(sizes):
    count = sizes.requests_at_once
    assert all(n * (sizes.nodes[n] + 1) <= sizes.scheduled_tokens for n in range(1, count + 1))
    if count < sizes.max_num_seqs:
        assert (count + 1) * (sizes.nodes[count + 1] + 1) > sizes.scheduled_tokens
        assert sizes.tokens_for_all > sizes.scheduled_tokens
    else:
        assert sizes.tokens_for_all <= sizes.scheduled_tokens


@pytest.mark.parametrize(
    ("nodes", "batched", "rows"),
    [
        ([64] * 8, 8192, 8 * 65),
        ([64] * 8, 300, 300),
        # vLLM's warm-up verifies full trees of all requests, whatever the schedule.
        ([64, 64, 6, 6, 6, 6, 6, 6], 8192, 8 * 65),
        ([64, 64, 64, 64, 0, 0, 0, 0], 8192, 8 * 65),
    ],
)
def test_rows_of_logits_that_are_kept_free(nodes, batched, rows):
    assert StepSizes((0, *nodes), 15, 15, batched, batched).logits_rows == rows
