"""A drafter that knows the answer, hidden behind wrong siblings: few steps, long non-first paths.

The engine, its drafter and its scheduler are real; only the logits between drafting and building are
replaced. At every depth the true next token is the drafter's third choice, or another of its first four,
and for requests verified as a chain, which has no siblings, its first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from vllm_ddtree.engine.proposer import TreeSpeculator


@contextlib.contextmanager
def oracle(texts: list[list[int]], ranks: Sequence[int] = (2,)) -> Iterator[None]:
    """Make every TreeSpeculator draft the continuation of known texts (prompt and answer).

    ``ranks``, cycled by position, say which choice (0 to 3) the true token is.

    A request is recognised by the text that has its last token at its position; where several have, any
    of them may be drafted, which costs acceptance but never correctness.
    """
    build = TreeSpeculator._build

    def known(self: Any, first: int, logits: torch.Tensor) -> None:
        stride, last = self.num_query_per_req, first + logits.shape[0]
        anchors = self.input_buffers.input_ids[first * stride : last * stride : stride].tolist()
        positions = self.sample_pos[first * self.horizon : last * self.horizon : self.horizon].tolist()
        logits, vocab = torch.full_like(logits, -30.0), logits.shape[-1]
        for row, (anchor, position) in enumerate(zip(anchors, positions, strict=True)):
            text = next((t for t in texts if position <= len(t) and t[position - 1] == anchor), [])
            chain = bool(self.store.is_chain[self.sample_idx_mapping[(first + row) * self.horizon]])
            for depth, token in enumerate(text[position : position + logits.shape[1]]):
                right = 0 if chain else ranks[(position + depth) % len(ranks)]
                choices = [token + 1, token + 2, token + 3][: max(2, right)]
                choices.insert(right, token)
                for rank, choice in enumerate(choices):
                    logits[row, depth, choice % vocab] = -0.5 * (rank + 1)
        build(self, first, logits)

    with mock.patch.object(TreeSpeculator, "_build", known):
        yield
