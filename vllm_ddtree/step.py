"""The bookkeeping of one step over the batch: one launch each on CUDA, elsewhere composed from `ops`.

Owns what happens between the forwards, on plain tensors: top-k of the drafter's logits, trees into the
store of all requests, positions and masks, the walk over rows of logits, the commit of accepted rows. Must
not know vLLM. The composition is the definition; the CUDA ops of the same names are tested against it.
Invariant: fixed shapes, no host synchronisation, outputs written in place.

Shapes: n requests of the batch, S states (rows of the store), Q = nodes + 1, W = ceil(Q / 32), D accepted
drafts at most, T rows of the step, R rows of logits. `states` int32 [n] is the state of each request,
`query_start` int32 [>= n + 1] its first row among T, `cu_logits` int32 [>= n + 1] among R, `computed` int32
[S] the context length of a state. vLLM's dummy batches have int64 `states`, which are converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_ddtree import ops

if TYPE_CHECKING:
    from vllm_ddtree.engine.state import TreeStore

# Stands for a draft that was never drawn, as opposed to one that was ruled out (any other negative number).
PLACEHOLDER = -2

_MAX_TOP = 1024
_MAX_HIDDEN = 32
_LOGIT_WORD = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}


def _fused(tensor: Tensor) -> bool:
    return tensor.is_cuda and ops.has_kernels("cuda")


def top_logps(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row and their log-probabilities.

    logits [R, V] float32, bfloat16 or float16. Returns float32 and int64 [R, k], by value descending, then id
    ascending. A row with a NaN gives NaN log-probabilities, which `build` takes for absent.
    """
    rows, vocab = logits.shape
    word = _LOGIT_WORD.get(logits.dtype, 0)
    if _fused(logits) and word and k <= _MAX_TOP:
        if vocab % word:  # the kernel reads whole 16-byte words; what pads them is absent
            logits = torch.nn.functional.pad(logits, (0, -vocab % word), value=-math.inf)
        logits = logits.contiguous()
        logps = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
        torch.ops.ddtree.top_logps(logits, logps, tokens)
        return logps, tokens
    # topk says nothing of the order among equals, so the id becomes part of the value.
    wide = logits.float() + 0.0  # -0 becomes 0
    bits = wide.view(torch.int32)
    value = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    keys = (value + torch.arange(vocab - 1, -1, -1, device=logits.device)).topk(k, dim=-1).values
    tokens = vocab - 1 - (keys & 0xFFFFFFFF)
    return wide.gather(-1, tokens) - wide.logsumexp(dim=-1, keepdim=True), tokens


def build_trees(
    logps: Tensor, tokens: Tensor, budgets: Tensor, rows: Tensor, store: TreeStore, drafts: Tensor
) -> None:
    """Build, index and mask the tree of each request, straight into the store.

    logps float32 and tokens int64 [n, L, K]; budgets int32 [n]; rows int64 [n], the state of each request,
    negative = a padded row, which is not stored; store.is_chain leaves a request one choice per depth.
    drafts int64 [n, nodes] receives the nodes' tokens in pop order, by request.
    """
    state = (store.tokens, store.parents, store.depths, store.node_logws, store.num_nodes)
    pointers = (store.next_token, store.next_sibling)
    if _fused(logps):
        torch.ops.ddtree.build_trees(
            logps, tokens, budgets, rows, store.is_chain, *state, *pointers, store.mask, drafts
        )
        return
    kept = torch.where(rows < 0, store.max_num_reqs, rows)
    logps = logps.clone()
    logps[..., 1:].masked_fill_(store.is_chain[kept][:, None, None], -math.inf)
    fresh = [torch.empty((len(kept), *t.shape[1:]), dtype=t.dtype, device=t.device) for t in state]
    ops.build(logps, tokens, budgets, *fresh)
    parents, count = fresh[1], fresh[4]
    index = torch.empty_like(fresh[0])
    found = [torch.empty_like(parents) for _ in pointers]
    ops.retrieve(parents, count, index, *found)
    mask = torch.empty((len(kept), *store.mask.shape[1:]), dtype=torch.int32, device=logps.device)
    ops.ancestor_mask(parents, count, mask)
    for target, value in zip((*state, *pointers, store.mask), (*fresh, *found, mask), strict=True):
        target.index_copy_(0, kept, value)
    drafts.copy_(fresh[0][:, 1:])


def begin_step(
    states: Tensor,
    query_start: Tensor,
    cu_logits: Tensor,
    computed: Tensor,
    store: TreeStore,
    positions: Tensor,
    local_pos: Tensor,
    step_mask: Tensor,
    tree_len: Tensor,
) -> None:
    """Give the rows of verified requests position = context + depth, and publish masks in batch order.

    A request with more than one row of logits is verified. In place: positions int64 [T]; local_pos int32
    [R], the depth of each row of logits; step_mask int32 [slots, Q, W]; tree_len int32 [slots], rows of the
    tree, 0 where nothing is verified.
    """
    if _fused(states):
        torch.ops.ddtree.begin_step(
            states.int(), query_start, cu_logits, computed, store.depths, store.mask, positions, local_pos,
            step_mask, tree_len,
        )  # fmt: skip
        return
    n, widest = states.shape[0], store.depths.shape[1] - 1
    starts = query_start[: n + 1].long()
    num_logits = (cu_logits[1 : n + 1] - cu_logits[:n]).to(torch.int32)
    verified = num_logits > 1
    tree_len.zero_()
    tree_len[:n] = torch.where(verified, num_logits, 0)
    step_mask[:n] = store.mask[states]
    owner, row = _owners(starts, positions.shape[0])
    depth = store.depths[states[owner], row.clamp(max=widest)]
    inside = verified[owner] & (row < starts[owner + 1] - starts[owner])
    positions.copy_(torch.where(inside, (computed[states[owner]] + depth).to(positions.dtype), positions))
    owner, row = _owners(cu_logits[: n + 1].long(), local_pos.shape[0])
    local_pos.copy_(store.depths[states[owner], row.clamp(max=widest)])


def _owners(starts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The request of each flat row and the row's place in it; rows past the last request count to it."""
    row = torch.arange(rows, device=starts.device)
    owner = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=len(starts) - 2)
    return owner, row - starts[owner]


def walk_rows(
    drawn: Tensor, drafts: Tensor, cu_logits: Tensor, states: Tensor, store: TreeStore, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.walk` over flat rows of logits and the trees of the store.

    drawn int64 [R], the target's own token at each row; drafts int32 [R], the row's token, negative = not a
    draft. A draft cut short is the smaller tree: pointers past its end lead nowhere.
    Returns sampled int64 [n, D + 1] (emitted tokens, -1 after), accept_index int64 [n, D + 1] (request * Q +
    node, root first, -1 after), num_sampled int32 [n].
    """
    n, width = states.shape[0], store.tokens.shape[1]
    accept_index = torch.empty(n, max_depth + 1, dtype=torch.int64, device=drawn.device)
    num_sampled = torch.empty(n, dtype=torch.int32, device=drawn.device)
    if _fused(drawn):
        sampled = torch.empty_like(accept_index)
        torch.ops.ddtree.walk_rows(
            drawn, drafts, cu_logits, states.int(), store.next_token, store.next_sibling, store.num_nodes,
            sampled, accept_index, num_sampled,
        )  # fmt: skip
        return sampled, accept_index, num_sampled
    tree, rows = padded_trees(drafts, cu_logits, states, store)
    predict = torch.empty(n * width, dtype=torch.int64, device=drawn.device)
    ops.walk(*tree, drawn[rows], predict, accept_index, num_sampled)
    sampled = torch.where(accept_index < 0, -1, predict[accept_index.clamp(min=0)])
    return sampled, accept_index, num_sampled + 1


def padded_trees(
    drafts: Tensor, cu_logits: Tensor, states: Tensor, store: TreeStore
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Ragged rows of logits as whole trees: the first four arguments of the walks, and the row of each slot.

    Arguments as in `walk_rows`; a tree also ends before its first PLACEHOLDER. Returns (candidates int64
    [n, Q], next_token, next_sibling int32 [n, Q], num_nodes int32 [n]) and rows int64 [n, Q]; slots without a
    row of logits point at the root's.
    """
    n, width = states.shape[0], store.tokens.shape[1]
    starts = cu_logits[:n].long()
    lengths = cu_logits[1 : n + 1].long() - starts
    node = torch.arange(width, device=drafts.device)
    inside = node < lengths[:, None]
    rows = torch.where(inside, starts[:, None] + node, starts[:, None])
    candidates = torch.where(inside, drafts[rows].long(), -1)
    end = torch.where(candidates == PLACEHOLDER, node, width).amin(dim=1)
    count = torch.minimum(store.num_nodes[states], torch.minimum(lengths, end).to(torch.int32) - 1)
    next_token, next_sibling = (
        torch.where(pointer[states] > count[:, None], -1, pointer[states])
        for pointer in (store.next_token, store.next_sibling)
    )
    return (candidates, next_token, next_sibling, count), rows


class CacheMover:
    """Moves accepted rows in a fixed set of caches; `views` as in `ops.make_move_table`."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._views = list(views)
        self._table = ops.make_move_table(views)
        self._row_bytes = max(view.shape[2] * view.shape[3] * view.element_size() for view in views)

    def move(self, accept_index: Tensor, query_start: Tensor, q_len: int, slot_mapping: Tensor) -> None:
        """Put the cache rows of the accepted nodes where a chain would have them.

        slot_mapping int64 [T], the slot each row was written to.
        """
        if _fused(accept_index):
            torch.ops.ddtree.commit_cache(
                self._table, self._row_bytes, accept_index, query_start, q_len, slot_mapping
            )
            return
        n, width = accept_index.shape
        source = torch.empty(n, width - 1, dtype=torch.int64, device=accept_index.device)
        target = torch.empty_like(source)
        ops.plan_moves(accept_index, query_start[:n], q_len, slot_mapping, source, target)
        ops.move_rows(self._views, self._table, source, target)


def commit_rows(
    hidden: Sequence[Tensor],
    positions: Tensor,
    accept_index: Tensor,
    query_start: Tensor,
    states: Tensor,
    computed: Tensor,
    q_len: int,
) -> None:
    """Move the hidden rows of accepted nodes to where a chain would have them; positions become linear again.

    In place: hidden tensors [T, H]; positions int64 [T].
    """
    if _fused(accept_index) and len(hidden) <= _MAX_HIDDEN and all(map(_whole_words, hidden)):
        torch.ops.ddtree.commit_rows(
            list(hidden), positions, accept_index, query_start, states.int(), computed, q_len
        )
        return
    n, width = accept_index.shape
    starts = query_start[: n + 1].long()
    owner, row = _owners(starts, positions.shape[0])
    inside = row < starts[owner + 1] - starts[owner]
    positions.copy_(torch.where(inside, computed[states[owner]].to(positions.dtype) + row, positions))
    taken = accept_index >= 0
    depth = torch.arange(width, device=accept_index.device)
    # Rows that stay where they are all become "root to root", so the shape never depends on the outcome.
    source = (starts[:n, None] + torch.where(taken, accept_index % q_len, 0)).flatten()
    target = (starts[:n, None] + torch.where(taken, depth, 0)).flatten()
    for rows in hidden:
        rows.index_copy_(0, target, rows.index_select(0, source))


def _whole_words(rows: Tensor) -> bool:
    size = rows.element_size()
    return rows.stride(1) == 1 and (rows.shape[1] * size | rows.stride(0) * size | rows.data_ptr()) % 16 == 0
