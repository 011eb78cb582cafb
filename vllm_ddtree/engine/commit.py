"""Before the forward and after the walk: the parts of a step shared by every deriver.

Owns turning an accepted path into a linear acceptance: cache rows, hidden rows and positions. It must not
know how the path was chosen. Invariant: fixed shapes, no host synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_ddtree import step
from vllm_ddtree.engine.layout import cache_rows
from vllm_ddtree.engine.state import TreeStep, TreeStore


def begin_step(
    store: TreeStore, tree_step: TreeStep, batch: InputBatch, num_computed_tokens: torch.Tensor
) -> None:
    """Give the rows of verified requests position = context + depth and publish their masks.

    Args:
        store: trees by request state.
        tree_step: receives masks and row counts in batch order.
        batch: the step's batch; ``positions`` and ``expanded_local_pos`` are rewritten in place, since
            captured graphs read the former, and the sampler's tests for placeholders and min_tokens count
            the latter, as depth.
        num_computed_tokens: [max_num_reqs] int32 on the device, context length by request state. The host
            copy must not be used: it is optimistic under async scheduling.
    """
    if batch.num_draft_tokens == 0:
        # Attention takes rows of length 0 for causal; a length left from an earlier step would mask them.
        tree_step.num_tree_reqs = 0
        tree_step.tree_len.zero_()
        return
    drafts = batch.num_draft_tokens_per_req
    whole = batch.num_reqs if drafts is None else int((drafts + 1 == batch.num_scheduled_tokens).sum())
    tree_step.num_tree_reqs = whole
    step.begin_step(
        batch.idx_mapping,
        batch.query_start_loc,
        batch.cu_num_logits,
        num_computed_tokens,
        store,
        batch.positions[: batch.num_tokens],
        batch.expanded_local_pos,
        tree_step.mask,
        tree_step.tree_len,
    )


class Commit:
    """Moves what an accepted path left in the caches and among the hidden rows to where a chain has it.

    The drafter's caches are left out: their rows are written after the commit, from the accepted path.
    """

    def __init__(self, runner: Any) -> None:
        layers = runner.compilation_config.static_forward_context
        drafter = runner.speculator.draft_attn_layer_names
        self._width = runner.tree_step.q_len
        self._caches: list[tuple[int, step.CacheMover]] = []
        for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
            views = [cache_rows(layers[name]) for name in spec.layer_names if name not in drafter]
            if views:
                self._caches.append((group, step.CacheMover(views)))

    def __call__(
        self,
        accept_index: torch.Tensor,
        batch: InputBatch,
        hidden_states: list[torch.Tensor],
        slot_mappings: torch.Tensor,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Commit one step.

        Args:
            accept_index: [n, D + 1] int64, the paths (see TreeScorer).
            batch: the step's batch; positions are linear again afterwards, row d of a request is depth d.
            hidden_states: tensors [tokens, hidden] that the drafter reads, permuted in place.
            slot_mappings: [groups, tokens] int64, the step's slot of every row.
            num_computed_tokens: as in :func:`begin_step`.
        """
        starts = batch.query_start_loc
        for group, mover in self._caches:
            mover.move(accept_index, starts, self._width, slot_mappings[group])
        step.commit_rows(
            hidden_states,
            batch.positions[: batch.num_tokens],
            accept_index,
            starts,
            batch.idx_mapping,
            num_computed_tokens,
            self._width,
        )
