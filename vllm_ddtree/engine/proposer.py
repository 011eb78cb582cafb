"""Draft and build: one DFlash forward over the block, then a best-first tree from its distributions.

Owns the drafter at its own horizon L (block size - 1), however many nodes the tree has, and writing
trees into the store. It must not know how a tree is verified. Invariant: tensors keep their shapes and
addresses and nothing synchronises, so drafting and building run inside the drafter's CUDA graph.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_ddtree import residual, step
from vllm_ddtree.engine.config import step_sizes
from vllm_ddtree.engine.state import TreeStore
from vllm_ddtree.options import TreeOptions
from vllm_ddtree.sizes import StepSizes

logger = init_logger("vllm.ddtree")


class TreeSpeculator(DFlashSpeculator):
    """vLLM's DFlash speculator with a tree builder behind its logits."""

    _speculator_name = "DDTree"

    def __init__(self, vllm_config: VllmConfig, device: torch.device, options: TreeOptions) -> None:
        # vLLM 0.33 sizes a staging buffer in __init__ through _num_graph_context_tokens.
        self.sizes = step_sizes(vllm_config)
        super().__init__(_at_horizon(vllm_config, self.sizes), device)
        self.horizon = self.num_speculative_steps
        self.max_depth = options.max_depth or self.horizon
        self.top_k = min(options.top_k or options.num_nodes, options.num_nodes, self.vocab_size)
        drawn = options.deriver == "residual"
        shape = (self.max_depth, self.vocab_size) if drawn else None
        self.store = TreeStore(self.max_num_reqs, options.num_nodes, device, shape)
        if self.store.draft_probs is not None:
            size = self.store.draft_probs.nbytes / 2**20
            logger.info("ddtree: the residual deriver keeps %.0f MiB of draft distributions.", size)
        self._nodes = torch.zeros(self.max_num_reqs, options.num_nodes, dtype=torch.int64, device=device)
        self._made_up = False  # the requests of this batch are not real
        self._budgets = torch.full((self.max_num_reqs,), options.num_nodes, dtype=torch.int32, device=device)
        self._grown_to = options.num_nodes
        self._kept_starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._kept_starts *= self.sizes.accepted_rows

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return self.sizes.context_rows(num_reqs)

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, block_tables: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Take the caches over; with slot mappings of its own where the runner's hold too few rows."""
        if self.max_num_tokens > block_tables.max_num_batched_tokens:
            block_tables = copy.copy(block_tables)
            groups = block_tables.slot_mappings.shape[0]
            block_tables.slot_mappings = block_tables.slot_mappings.new_zeros(groups, self.max_num_tokens)
        super().set_attn(model_state, kv_cache_config, block_tables, *args, **kwargs)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden = self._run_model(
            num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode
        )
        at_once = self.sizes.head_requests
        for first in range(0, num_reqs, at_once):
            rows = self.sample_indices[first * self.horizon : min(first + at_once, num_reqs) * self.horizon]
            logits = self.model.compute_logits(hidden[rows])
            self._build(first, logits.view(-1, self.horizon, logits.shape[-1]))

    def _build(self, first: int, logits: torch.Tensor) -> None:
        """Turn drafter logits [n, L, V] of the requests from ``first`` on into trees, keyed by state."""
        num_reqs = logits.shape[0]
        logits = logits[:, : self.max_depth]
        own = slice(first * self.horizon, (first + num_reqs) * self.horizon)
        states = self.sample_idx_mapping[own][:: self.horizon]
        if self.store.draft_probs is None:
            logps, tokens = step.top_logps(logits.reshape(-1, logits.shape[-1]), self.top_k)
        else:
            positions = self.sample_pos[own].view(num_reqs, -1)[:, : self.max_depth]
            logps, tokens = residual.draw_children(
                logits, self.temperature, self.seeds, positions, states, self.top_k, self.store.draft_probs
            )
        shape = (num_reqs, -1, self.top_k)
        step.build_trees(
            logps.view(shape),
            tokens.view(shape),
            self._budgets[:num_reqs],
            states,
            self.store,
            self._nodes[first : first + num_reqs],
        )

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft for the batch; returns the nodes in pop order, [num_reqs, nodes] int64."""
        self._made_up = bool(kwargs.get("dummy_run"))
        self._grow_to(kwargs.get("num_speculative_tokens"))
        width = _verified_width(input_batch)
        kept = self.sizes.accepted_rows
        if width > kept and aux_hidden_states and not self._made_up:
            input_batch, aux_hidden_states = self._accepted_rows(input_batch, aux_hidden_states, width)
            num_rejected = num_rejected - (width - kept)
        drafted = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            *args,
            **kwargs,
        )
        if kwargs.get("is_profile"):
            # vLLM profiles a draft of no more rows than the target's; all requests at once can have more.
            self._run_model(self.max_num_reqs * self.num_query_per_req, None, None, None)
        return self._nodes[: drafted.shape[0]]

    def _prepare_eplb_forward(self, num_unpadded_tokens: int) -> None:
        """The last of vLLM's calls before it drafts, eagerly or by replaying a graph."""
        super()._prepare_eplb_forward(num_unpadded_tokens)
        if self._made_up:
            # Named 0, 1, ... as live requests are; as padded rows they leave their trees alone.
            self.sample_idx_mapping.fill_(-1)

    def _grow_to(self, nodes: int | None) -> None:
        """Build no more nodes than the scheduler will take, None for all; graphs read how many."""
        nodes = self.sizes.most_nodes if nodes is None else nodes
        if nodes != self._grown_to:
            self._budgets.fill_(nodes)
            self._grown_to = nodes

    def _accepted_rows(
        self, batch: InputBatch, aux_hidden_states: list[torch.Tensor], width: int
    ) -> tuple[InputBatch, list[torch.Tensor]]:
        """The batch less the rows that hold no accepted token: after the commit those are a request's first.

        For batches whose requests are all verified, with ``width`` rows each. The drafter's context
        projection is most of its work where trees are wide.
        """
        count, kept = batch.num_reqs, self.sizes.accepted_rows

        def first(rows: torch.Tensor) -> torch.Tensor:
            return rows[: count * width].view(count, width, *rows.shape[1:])[:, :kept]

        hidden = [first(rows) for rows in aux_hidden_states]
        if count > 1:  # one request's rows are views; those of more are copied, in one launch
            hidden = [torch.cat(hidden, dim=-1)]
        batch = copy.copy(batch)
        batch.num_tokens = count * kept
        batch.num_scheduled_tokens = np.full(count, kept, dtype=batch.num_scheduled_tokens.dtype)
        batch.query_start_loc = self._kept_starts[: count + 1]
        batch.positions = first(batch.positions).flatten()
        return batch, [rows.flatten(0, 1) for rows in hidden]

    def _prepare_eplb_forward(self, num_unpadded_tokens: int) -> None:
        """The last of vLLM's calls before it drafts, eagerly or by replaying a graph."""
        super()._prepare_eplb_forward(num_unpadded_tokens)
        if self._made_up:
            # Named 0, 1, ... as live requests are; as padded rows they leave their trees alone.
            self.sample_idx_mapping.fill_(-1)


def _verified_width(batch: InputBatch) -> int:
    """Rows of each request where all are verified with equally many, else 0; from what the host knows."""
    drafts = batch.num_draft_tokens_per_req
    if drafts is None or not batch.num_draft_tokens:
        return 0
    width = int(batch.num_scheduled_tokens[0])
    whole = (batch.num_scheduled_tokens == width).all() and (drafts == width - 1).all()
    return width if whole else 0


def _at_horizon(vllm_config: VllmConfig, sizes: StepSizes) -> VllmConfig:
    """A shallow copy of the config in which the drafter predicts its own horizon, not the node count.

    Its buffers hold a block of every request, which can be more rows than a step of the target has.
    """
    config = copy.copy(vllm_config)
    spec = copy.copy(vllm_config.speculative_config)
    spec.num_speculative_tokens = sizes.horizon
    spec.num_speculative_tokens_per_batch_size = None
    config.speculative_config = spec
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = sizes.drafter_rows
    return config
