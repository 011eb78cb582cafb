"""Positions before the forward and the commit after the walk: the parts shared by every deriver.

Owns turning an accepted path into a linear acceptance: cache rows, hidden rows and positions. It must
not know how the path was chosen. Invariant: fixed shapes, no host synchronisation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_ddtree import ops
from vllm_ddtree.engine.layout import cache_rows
from vllm_ddtree.engine.state import TreeStep, TreeStore

if TYPE_CHECKING:
    from vllm_ddtree.engine.scorer import Accepted


def begin_step(
    store: TreeStore,
    step: TreeStep,
    batch: InputBatch,
    num_computed_tokens: torch.Tensor,
    linear_positions: torch.Tensor,
) -> None:
    """Give the rows of verified requests position = context + depth and publish their masks.

    Args:
        store: trees by request state.
        step: receives masks and row counts in batch order.
        batch: the step's batch; ``positions`` and ``expanded_local_pos`` are rewritten in place, since
            captured graphs read the former and vLLM's samplers the latter.
        num_computed_tokens: [max_num_reqs] int32 on the device, context length by request state. The host
            copy must not be used: it is optimistic under async scheduling.
        linear_positions: [max_num_tokens] int64, receives the positions before the rewrite.
    """
    n, num_tokens = batch.num_reqs, batch.num_tokens
    drafts = batch.num_draft_tokens_per_req
    step.num_tree_reqs = n if drafts is None else int((drafts + 1 == batch.num_scheduled_tokens).sum())
    positions = batch.positions[:num_tokens]
    linear_positions[:num_tokens].copy_(positions)
    state = batch.idx_mapping
    starts = batch.query_start_loc[: n + 1].long()
    num_logits = (batch.cu_num_logits[1:] - batch.cu_num_logits[:-1])[:n]
    verified = num_logits > 1

    token = torch.arange(num_tokens, device=positions.device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp(max=n - 1)
    node = token - starts[row]
    depth = store.depths[state[row], node.clamp(max=step.max_nodes)].to(positions.dtype)
    context = num_computed_tokens[state[row]].to(positions.dtype)
    positions.copy_(torch.where(verified[row], context + depth, positions))

    step.mask[:n].copy_(store.mask[state])
    step.tree_len[:n].copy_(torch.where(verified, num_logits, 0))

    logits_start = batch.cu_num_logits[:-1].long()
    logit = torch.arange(batch.expanded_local_pos.shape[0], device=positions.device)
    owner = torch.searchsorted(batch.cu_num_logits[1:].long(), logit, right=True).clamp(max=n - 1)
    local = (logit - logits_start[owner]).clamp(max=step.max_nodes)
    # The sampler's tests for placeholders and min_tokens count depth, not rows.
    batch.expanded_local_pos.copy_(store.depths[state[owner], local])


def restore_positions(batch: InputBatch, linear_positions: torch.Tensor) -> None:
    """Undo :func:`begin_step`'s positions: after the commit, row d of a request is depth d again."""
    batch.positions[: batch.num_tokens].copy_(linear_positions[: batch.num_tokens])


def select_hidden_rows(
    hidden_states: list[torch.Tensor], accepted: Accepted, query_start_loc: torch.Tensor, width: int
) -> None:
    """Move the accepted nodes' hidden rows to where a chain would have them.

    Args:
        hidden_states: tensors [tokens, hidden], permuted in place.
        accepted: the paths.
        query_start_loc: [>= n + 1] int32, first row of each request.
        width: nodes + 1.
    """
    path = accepted.accept_index
    n = path.shape[0]
    starts = query_start_loc[:n].long()[:, None]
    depth = torch.arange(path.shape[1], device=path.device)
    taken = path >= 0
    # Rows that stay where they are all become "root to root", so the shape never depends on the outcome.
    source = (starts + torch.where(taken, path % width, 0)).flatten()
    target = (starts + torch.where(taken, depth, 0)).flatten()
    for hidden in hidden_states:
        hidden.index_copy_(0, target, hidden.index_select(0, source))


class CacheMover:
    """Moves accepted KV rows in every target layer; one launch per cache group.

    The drafter's layers are left out: their rows are written after the commit, from the accepted path.
    """

    def __init__(self, runner: Any) -> None:
        layers = runner.compilation_config.static_forward_context
        drafter = runner.speculator.draft_attn_layer_names
        self._groups: list[tuple[int, list[torch.Tensor], torch.Tensor]] = []
        for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
            names = [name for name in spec.layer_names if name not in drafter]
            views = [cache_rows(layers[name]) for name in names]
            if views:
                self._groups.append((group, views, ops.make_move_table(views)))
        depth, rows = runner.speculator.max_depth, runner.max_num_reqs
        self._source = torch.empty(rows, depth, dtype=torch.int64, device=runner.device)
        self._target = torch.empty_like(self._source)
        self._width = runner.tree_step.q_len

    def move(self, accepted: Accepted, query_start_loc: torch.Tensor, slot_mappings: torch.Tensor) -> None:
        """Compact the caches.

        Args:
            accepted: the paths.
            query_start_loc: [>= n + 1] int32.
            slot_mappings: [groups, tokens] int64, the step's slot of every row.
        """
        n = accepted.accept_index.shape[0]
        source, target = self._source[:n], self._target[:n]
        for group, views, table in self._groups:
            ops.plan_moves(
                accepted.accept_index, query_start_loc[:n], self._width, slot_mappings[group], source, target
            )
            ops.move_rows(views, table, source, target)
