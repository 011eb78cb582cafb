"""Verify: vLLM's rejection sampler with a deriver of ours in place of its chain rule.

Owns the fit between the two: what vLLM hands in and expects back, chunks of big batches, log-probabilities
along the path. It must not know the rule (derivers.py) nor how the path is committed (commit.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, get_max_chunk_logits

from vllm_ddtree.engine.derivers import Scores, make_deriver
from vllm_ddtree.engine.state import TreeStore
from vllm_ddtree.options import TreeOptions


class TreeScorer(RejectionSampler):
    """vLLM's rejection sampler with a tree walk in place of its chain rule."""

    def __init__(
        self,
        sampler: Sampler,
        spec_config: SpeculativeConfig,
        device: torch.device,
        store: TreeStore,
        options: TreeOptions,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self.store = store
        self._derive = make_deriver(sampler, store, options)
        self.accept_index: torch.Tensor | None = None
        self._chunks: list[torch.Tensor] = []
        self._want_logprobs = False

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Verify one batch; ``accept_index`` then holds the paths of its requests, in batch order.

        accept_index: [n, D + 1] int64, flat slots of the accepted path (row * (nodes + 1) + node), root
        first, -1 after.
        """
        self._chunks = []
        states = self.sampler.sampling_states
        self._want_logprobs = states.max_num_logprobs(input_batch.idx_mapping_np) != NO_LOGPROBS
        output = super().__call__(logits, input_batch, *args, **kwargs)
        chunks = self._chunks
        self.accept_index = chunks[0] if len(chunks) == 1 else _join(chunks, self.store.tokens.shape[1])
        return output

    def hold(self, logits: torch.Tensor) -> None:
        """Allocate, and free again, what verifying [rows, V] logits allocates."""
        chunk = logits[: get_max_chunk_logits(logits.shape[1])]
        _ = [chunk.to(torch.float32, copy=True) for _ in range(self._derive.float32_copies)]

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        # A draft that vLLM marked invalid (placeholder, grammar) is -1 and so never accepted.
        scores = Scores(
            processed,
            verify_draft_sampled,
            draft_sampled,
            pos,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            cu_num_logits,
        )
        sampled, accept_index, num_sampled = self._derive(scores)
        self._chunks.append(accept_index)
        if self._want_logprobs:
            _put_path_first(
                logits, processed, accept_index, cu_num_logits[:-1].long(), self.store.tokens.shape[1]
            )
        return processed, sampled, num_sampled


def _join(chunks: list[torch.Tensor], width: int) -> torch.Tensor:
    """Concatenate chunks of requests; each chunk's flat slots start at its own first request."""
    offset, paths = 0, []
    for index in chunks:
        paths.append(torch.where(index < 0, index, index + offset * width))
        offset += index.shape[0]
    return torch.cat(paths)


def _put_path_first(
    logits: torch.Tensor,
    processed: torch.Tensor,
    accept_index: torch.Tensor,
    starts: torch.Tensor,
    width: int,
) -> None:
    """Move the logits of the accepted path to the rows where a chain would have them.

    vLLM reads the log-probabilities of emitted token d of a request at its row d.
    """
    node = accept_index.clamp(min=0) % width
    depth = torch.arange(accept_index.shape[1], device=logits.device)
    accepted = accept_index >= 0
    source = (starts[:, None] + torch.where(accepted, node, 0)).flatten()
    target = (starts[:, None] + torch.where(accepted, depth, 0)).flatten()
    seen = {}
    for tensor in (logits, processed):
        if tensor.data_ptr() not in seen:
            seen[tensor.data_ptr()] = tensor.index_copy_(0, target, tensor.index_select(0, source))
