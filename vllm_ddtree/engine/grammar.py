"""Grammar masks on trees: the engine's half of structured output.

The scheduler makes masks from flat drafts, in the engine's process; the tree's parents live in the worker.
Owns how they travel (packed into the copy of the drafts that goes to the host anyway) and the matcher that
follows a tree while vLLM's own loop believes that it walks a chain. Invariant: a mask row is that of its
node's own path; a node that the grammar refuses closes everything below it and costs no matcher work.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_ddtree.engine.config import step_sizes

# Backends whose matchers go back several tokens at once, tested on trees; others get chains.
TREE_BACKENDS = ("xgrammar", "guidance")
_SHIFT = 32
_TOKEN = 2**_SHIFT - 1
_PARENTS = "_ddtree_parents"  # on a StructuredOutputRequest
_NARROW = "_ddtree_narrow"  # on a StructuredOutputManager: its config for each width of a step


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


def with_ruled_out(kept: list[int], drafts: list[int]) -> list[int]:
    """What a grammar kept of a chain's drafts, and -1 for the first that it refused.

    Where children are drawn from the drafter the walk must try that draft and reject it: cut off, it would be
    one that nobody drew, and its share of the target would go to all tokens instead of those left.
    """
    return [*kept, -1] if len(kept) < len(drafts) and drafts[len(kept)] >= 0 else kept


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


@contextlib.contextmanager
def rows_of_step(manager: Any, request_ids: list[str], scheduled: dict[str, list[int]]) -> Iterator[None]:
    """Within, vLLM makes as many mask rows per request as the step's widest tree has, not the widest of all.

    A row is a bit per token, and all rows cross to the worker and to the device in every step: with 64
    structured requests of 8 nodes in an engine of up to 64 nodes, 64 x 65 rows of 19 kB instead of 64 x 9.
    Widths are rounded up to those of the schedule, since the kernel that applies the masks compiles each.
    """
    whole = manager.vllm_config
    if not hasattr(manager, _NARROW):
        setattr(manager, _NARROW, {width: _of_width(whole, width) for width in {0, *step_sizes(whole).nodes}})
    by_width = getattr(manager, _NARROW)
    widest = max((len(scheduled.get(request_id, ())) for request_id in request_ids), default=0)
    width = min(nodes for nodes in by_width if nodes >= widest)
    rows, masks = len(request_ids) * (width + 1), manager._grammar_bitmask
    if manager.backend is not None and (masks is None or masks.shape[0] < rows):
        grown = rows if masks is None else max(rows, 2 * masks.shape[0])
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(grown)
    manager.vllm_config = by_width[width]
    try:
        yield
    finally:
        manager.vllm_config = whole


def _of_width(vllm_config: Any, nodes: int) -> Any:
    """A shallow copy of the config whose drafts have so many tokens."""
    config = copy.copy(vllm_config)
    config.speculative_config = copy.copy(vllm_config.speculative_config)
    config.speculative_config.num_speculative_tokens = nodes
    return config


class TreeMasks(StructuredOutputsWorker):
    """The worker's half of :func:`rows_of_step`: a buffer for real steps, and the step's own stride."""

    def apply_grammar_bitmask(
        self, logits: torch.Tensor, input_batch: Any, grammar_req_ids: list[str], grammar_bitmask: np.ndarray
    ) -> None:
        """Mask the logits of structured requests; arguments as in vLLM's class."""
        if not grammar_req_ids:
            return
        rows = grammar_bitmask.shape[0]
        if rows > self.grammar_bitmask.shape[0]:
            # Only where trees of very different widths meet in one step.
            self.grammar_bitmask = self.grammar_bitmask.new_empty(rows, self.grammar_bitmask.shape[1])
            self.logits_indices = self.logits_indices.new_empty(rows)
            self.copy_stream.wait_stream(torch.cuda.current_stream())
        if not hasattr(self, "num_bonus_tokens"):  # vLLM 0.32, whose requests have rows of their own number
            self.mask_stride = rows // len(grammar_req_ids)
        super().apply_grammar_bitmask(logits, input_batch, grammar_req_ids, grammar_bitmask)
