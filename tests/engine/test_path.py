"""Accepted paths that run over non-first siblings, so that masks, positions and moved rows all matter.

The same constructed case is then run with the mask, the positions, the cache compaction and the pointers
broken on purpose: each must change the text, or the case would prove nothing.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from engines import accepted_length, engine, generate, greedy, prompts, tree
from oracle import oracle

from vllm_ddtree import step
from vllm_ddtree.engine import commit
from vllm_ddtree.engine.runner import TreeRunnerMixin

TOKENS = 24
NODES = 40


@pytest.fixture(scope="module")
def case(tiny):
    asked = prompts(3, seed=5)
    with engine(tiny) as llm:
        answers = generate(llm, asked, greedy(TOKENS))
    return asked, answers


def run(tiny, case):
    asked, answers = case
    with oracle([p + a for p, a in zip(asked, answers, strict=True)]), engine(tiny, tree(NODES)) as llm:
        return generate(llm, asked, greedy(TOKENS)), accepted_length(llm)


def test_rows_really_move_and_the_text_is_right(tiny, case):
    moved = []
    move = step.CacheMover.move

    def counting(self, accept_index, query_start, q_len, slots):
        node, depth = accept_index % q_len, torch.arange(accept_index.shape[1], device=accept_index.device)
        moved.append(int(((accept_index >= 0) & (node != depth)).sum()))
        move(self, accept_index, query_start, q_len, slots)

    with mock.patch.object(step.CacheMover, "move", counting):
        text, length = run(tiny, case)
    assert text == case[1]
    # 3 choices per depth: 3 + 9 + 27 nodes reach depth 3, and 40 nodes hold nearly all of them.
    assert length > 2.5
    assert sum(moved) > 10


def no_mask(store, step, *rest):
    BEGIN(store, step, *rest)
    step.tree_len.zero_()  # attention falls back to causal rows


def no_depth(store, step, batch, computed):
    linear = batch.positions[: batch.num_tokens].clone()
    BEGIN(store, step, batch, computed)
    batch.positions[: batch.num_tokens].copy_(linear)


def no_hidden_rows(hidden, *rest):
    COMMIT_ROWS([], *rest)


BEGIN, COMMIT_ROWS = commit.begin_step, step.commit_rows


@pytest.mark.parametrize("broken", ["mask", "positions", "compaction"])
def test_a_broken_part_changes_the_text(tiny, case, broken):
    parts = {
        "mask": mock.patch.object(commit, "begin_step", no_mask),
        "positions": mock.patch.object(commit, "begin_step", no_depth),
        "compaction": mock.patch.object(step.CacheMover, "move", lambda *_: None),
    }
    with parts[broken]:
        text, _ = run(tiny, case)
    assert text != case[1]


def test_without_the_hidden_row_permutation_drafts_differ(tiny):
    """The permutation changes no output, only what the drafter reads: compare its drafts."""
    drafts = {}
    for broken in (False, True):
        seen = []
        propose = TreeRunnerMixin.sample_tokens

        def watch(self, grammar, seen=seen, propose=propose):
            result = propose(self, grammar)
            seen.append(self.tree_store.tokens.clone())
            return result

        patches = [mock.patch.object(TreeRunnerMixin, "sample_tokens", watch)]
        if broken:
            patches.append(mock.patch.object(step, "commit_rows", no_hidden_rows))
        for patch in patches:
            patch.start()
        try:
            with engine(tiny, tree(64)) as llm:
                text = generate(llm, prompts(4), greedy(10))
        finally:
            for patch in patches:
                patch.stop()
        drafts[broken] = (text, seen)
    assert drafts[False][0] == drafts[True][0]
    assert len(drafts[False][1]) != len(drafts[True][1]) or not all(
        torch.equal(a, b) for a, b in zip(drafts[False][1], drafts[True][1], strict=True)
    )
