"""Verify and walk: the target's own draw at every node, then the longest path that agrees with it.

Owns deriving (contract.md, 1): scores on a tree in, accepted path and emitted tokens out. It must not
know how the path is committed. Invariant: a token is emitted only where the target, given its true
prefix, drew it with the noise it would have used without speculation, so the text is the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_ddtree import step
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
        assert options.max_depth is not None
        self.store = store
        self.max_depth = options.max_depth
        self.synthetic_length = options.synthetic_acceptance_length
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
        drawn = self._draw(processed, expanded_idx_mapping, pos, idx_mapping_np)

        # A draft that vLLM marked invalid (placeholder, grammar) is -1 and so never equals a drawn token.
        sampled, accept_index, num_sampled = step.walk_rows(
            drawn, verify_draft_sampled, cu_num_logits, idx_mapping, self.store, self.max_depth
        )
        width = self.store.tokens.shape[1]
        if self.synthetic_length is not None:
            count = torch.minimum(self.store.num_nodes[idx_mapping], cu_num_logits.diff() - 1)
            accept_index, num_sampled, sampled = _impose_length(
                self.synthetic_length, count, pos, drawn, cu_num_logits, accept_index, width
            )
        self._chunks.append(accept_index)
        if self._want_logprobs:
            _put_path_first(logits, processed, accept_index, cu_num_logits[:-1].long(), width)
        return processed, sampled, num_sampled

    def _draw(
        self,
        processed: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        pos: torch.Tensor,
        idx_mapping_np: np.ndarray,
    ) -> torch.Tensor:
        """The target's own token at every row, [rows] int64, keyed by (seed, position)."""
        states = self.sampler.sampling_states
        if not np.any(states.temperature.np[idx_mapping_np]):
            return processed.argmax(dim=-1)
        return gumbel_sample(
            processed,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )


def _join(chunks: list[torch.Tensor], width: int) -> torch.Tensor:
    """Concatenate chunks of requests; each chunk's flat slots start at its own first request."""
    offset, paths = 0, []
    for index in chunks:
        paths.append(torch.where(index < 0, index, index + offset * width))
        offset += index.shape[0]
    return torch.cat(paths)


def _impose_length(
    mean: float,
    count: torch.Tensor,
    pos: torch.Tensor,
    drawn: torch.Tensor,
    cu_num_logits: torch.Tensor,
    accept_index: torch.Tensor,
    q_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A path of the wanted length instead of the walk's, for benchmarks with dummy weights.

    Its depth is the mean rounded up or down by the root's position, and its nodes are spread over the
    tree, so that the commit moves as many rows as a real path would. Returns accept_index, num_sampled and
    sampled as the walk does.
    """
    starts = cu_num_logits[:-1].long()
    n, width = accept_index.shape
    wanted = mean - 1
    # 0.618...: the golden ratio spreads consecutive positions evenly over [0, 1).
    threshold = (pos[starts].double() * 0.6180339887498949) % 1.0
    depth = (math.floor(wanted) + (threshold < wanted % 1.0)).clamp(max=width - 1)
    depth = torch.minimum(depth.to(torch.int32), count)
    step_of = torch.arange(width, device=count.device)
    node = step_of * torch.div(count, depth.clamp(min=1), rounding_mode="floor")[:, None]
    inside = step_of <= depth[:, None]
    slots = torch.arange(n, device=count.device)[:, None] * q_len + node
    sampled = drawn[starts[:, None] + torch.where(inside, node, 0)]
    return torch.where(inside, slots, -1), depth + 1, sampled


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
