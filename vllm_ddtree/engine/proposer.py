"""Draft and build: one DFlash forward over the block, then a best-first tree from its distributions.

Owns the drafter at its own horizon L (block size - 1), however many nodes the tree has, and writing
trees into the store. It must not know how a tree is verified. Invariant: tensors keep their shapes and
addresses and nothing synchronises, so drafting and building run inside the drafter's CUDA graph.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_ddtree import residual, step
from vllm_ddtree.engine.config import drafter_horizon
from vllm_ddtree.engine.state import TreeStore
from vllm_ddtree.options import TreeOptions

logger = init_logger("vllm.ddtree")


class TreeSpeculator(DFlashSpeculator):
    """vLLM's DFlash speculator with a tree builder behind its logits."""

    _speculator_name = "DDTree"

    def __init__(self, vllm_config: VllmConfig, device: torch.device, options: TreeOptions) -> None:
        # vLLM 0.33 sizes a staging buffer in __init__ through _num_graph_context_tokens.
        self.num_nodes = options.num_nodes
        config = _at_horizon(vllm_config)
        super().__init__(config, device)
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
        self._budgets = torch.full((self.max_num_reqs,), options.num_nodes, dtype=torch.int32, device=device)

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        # A full verification leaves nodes + 1 rows per request, not horizon + 1.
        return min(num_reqs * (self.num_nodes + 1), self.max_num_tokens)

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
        num_sample = num_reqs * self.horizon
        logits = self.model.compute_logits(hidden[self.sample_indices[:num_sample]])
        self._build(num_reqs, logits.view(num_reqs, self.horizon, -1))

    def _build(self, num_reqs: int, logits: torch.Tensor) -> None:
        """Turn drafter logits [n, L, V] into trees, keyed by request state."""
        logits = logits[:, : self.max_depth]
        states = self.sample_idx_mapping[: num_reqs * self.horizon : self.horizon]
        if self.store.draft_probs is None:
            logps, tokens = step.top_logps(logits.reshape(-1, logits.shape[-1]), self.top_k)
        else:
            positions = self.sample_pos[: num_reqs * self.horizon].view(num_reqs, -1)[:, : self.max_depth]
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
            self._nodes[:num_reqs],
        )

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft for the batch; returns the nodes in pop order, [num_reqs, nodes] int64."""
        num_reqs = super().propose(*args, **kwargs).shape[0]
        return self._nodes[:num_reqs]


def _at_horizon(vllm_config: VllmConfig) -> VllmConfig:
    """A shallow copy of the config in which the drafter predicts its own horizon, not the node count."""
    config = copy.copy(vllm_config)
    spec = copy.copy(vllm_config.speculative_config)
    spec.num_speculative_tokens = drafter_horizon(spec)
    spec.num_speculative_tokens_per_batch_size = None
    config.speculative_config = spec
    return config
