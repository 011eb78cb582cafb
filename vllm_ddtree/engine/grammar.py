"""Grammar masks on trees: the engine's half of structured output.

The scheduler makes masks from flat drafts, in the engine's process; the tree's parents live in the worker.
Owns how they travel (packed into the copy of the drafts that goes to the host anyway) and the matcher that
follows a tree while vLLM's own loop believes that it walks a chain. Invariant: a mask row is that of its
node's own path; a node that the grammar refuses closes everything below it and costs no matcher work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# Backends whose matchers go back several tokens at once, tested on trees; others get chains.
TREE_BACKENDS = ("xgrammar", "guidance")
_SHIFT = 32
_TOKEN = 2**_SHIFT - 1
_PARENTS = "_ddtree_parents"  # on a StructuredOutputRequest


def pack(tokens: torch.Tensor, parents: torch.Tensor, is_chain: torch.Tensor) -> torch.Tensor:
    """Draft tokens int64 [n, nodes] with each node's parent + 1 above bit 32; chains stay as they are."""
    packed = tokens + ((parents.long() + 1) << _SHIFT)
    return torch.where(is_chain[:, None], tokens, packed)


class TreeGrammar:
    """Stands in for a request's grammar while vLLM fills the masks of one step.

    vLLM fills row i and then accepts draft i, for i = 0, 1, ..., and rolls back. Here row i belongs to node i
    (0 is the root); drafts are only noted, and the roll back visits the tree depth first, which moves the
    matcher least. Rows that no path reaches stay all ones.
    """

    def __init__(self, grammar: Any, parents: list[int]) -> None:
        self._grammar, self._parents = grammar, parents
        self._bitmask: torch.Tensor | None = None
        self._first = 0  # the root's row
        self._tokens: list[int] = []
        self._request_id = ""

    def is_terminated(self) -> bool:
        """Never: what lies behind an end is masked like what the grammar refused."""
        return False

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        """Write the root's mask; the others follow in :meth:`rollback`."""
        if self._bitmask is not None:
            return
        self._bitmask, self._first = bitmask, row
        if self._grammar.is_terminated():
            bitmask[row].fill_(-1)
        else:
            self._grammar.fill_bitmask(bitmask, row)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Note the next node's token."""
        self._request_id = request_id
        self._tokens += tokens
        return True

    def rollback(self, _count: int) -> None:
        """Write the masks of all nodes; the matcher is then where it was."""
        assert self._bitmask is not None
        nodes = len(self._tokens)
        rows = self._bitmask.numpy()[self._first : self._first + nodes + 1]
        rows[1:] = -1
        children: list[list[int]] = [[] for _ in range(nodes + 1)]
        for node, parent in enumerate(self._parents[:nodes], start=1):
            children[parent].append(node)
        if not self._grammar.is_terminated():
            self._visit(0, children, rows)

    def _visit(self, node: int, children: list[list[int]], rows: np.ndarray) -> None:
        for child in children[node]:
            token = self._tokens[child - 1]
            # Asked of the mask, since a matcher that refuses a token says so in the log.
            if not int(rows[node, token >> 5]) >> (token & 31) & 1:
                continue
            if not self._grammar.accept_tokens(self._request_id, [token]):
                continue
            if not self._grammar.is_terminated():
                self._grammar.fill_bitmask(self._bitmask, self._first + child)
                self._visit(child, children, rows)
            self._grammar.rollback(1)


def unpack(request: Any, spec_tokens: list[int]) -> list[int] | None:
    """The tokens of a tree's drafts, whose parents are kept for :func:`trees`; None for a chain or no drafts.

    Nothing is cut: what the grammar refuses is masked at its parent.
    """
    if not spec_tokens or spec_tokens[0] <= _TOKEN:
        return None
    nodes = [token for token in spec_tokens if token >= 0]
    if request.use_structured_output:
        parents = [(node >> _SHIFT) - 1 for node in nodes]
        setattr(request.structured_output_request, _PARENTS, parents)
    return [node & _TOKEN for node in nodes]


@contextlib.contextmanager
def trees(requests: Any, request_ids: list[str], scheduled: dict[str, list[int]]) -> Iterator[None]:
    """Within, the grammars of requests whose drafts are trees walk trees."""
    honest = []
    try:
        for request_id in request_ids:
            structured = requests[request_id].structured_output_request
            parents = getattr(structured, _PARENTS, None)
            if parents and scheduled.get(request_id):
                honest.append((structured, structured.grammar))
                structured.grammar = TreeGrammar(structured.grammar, parents)
        yield
    finally:
        for structured, grammar in honest:
            structured.grammar = grammar
