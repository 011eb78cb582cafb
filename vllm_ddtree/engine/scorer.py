"""Verify and walk: the target's own draw at every node, then the longest path that agrees with it.

Owns deriving (contract.md, 1): scores on a tree in, accepted path and emitted tokens out. It must not
know how the path is committed. Invariant: a token is emitted only where the target, given its true
prefix, drew it with the noise it would have used without speculation, so the text is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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

from vllm_ddtree import ops
from vllm_ddtree.engine.state import TreeStore
from vllm_ddtree.options import TreeOptions


@dataclass
class Accepted:
    """What the walk decided, in batch order.

    Attributes:
        accept_index: [n, D + 1] int64, flat slots of the accepted path (row * (nodes + 1) + node),
            root first, -1 after.
        accept_token_num: [n] int32, accepted drafts.
    """

    accept_index: torch.Tensor
    accept_token_num: torch.Tensor


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
        self.accepted: Accepted | None = None
        self._chunks: list[Accepted] = []
        self._want_logprobs = False

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Verify one batch; ``accepted`` then holds the paths of its requests."""
        self._chunks = []
        states = self.sampler.sampling_states
        self._want_logprobs = states.max_num_logprobs(input_batch.idx_mapping_np) != NO_LOGPROBS
        output = super().__call__(logits, input_batch, *args, **kwargs)
        chunks = self._chunks
        self.accepted = chunks[0] if len(chunks) == 1 else _join(chunks, self.store.tokens.shape[1])
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

        n, width = idx_mapping.shape[0], self.store.tokens.shape[1]
        starts = cu_num_logits[:-1].long()
        lengths = cu_num_logits[1:].long() - starts
        node = torch.arange(width, device=drawn.device)
        inside = node < lengths[:, None]
        rows = torch.where(inside, starts[:, None] + node, starts[:, None])
        # A draft that vLLM marked invalid (placeholder, grammar) is -1 and so never equals a drawn token.
        candidates = torch.where(inside, verify_draft_sampled[rows].long(), -1)
        count = torch.minimum(self.store.num_nodes[idx_mapping], (lengths - 1).to(torch.int32))
        predict = torch.empty(n * width, dtype=torch.int64, device=drawn.device)
        accept_index = torch.empty(n, self.max_depth + 1, dtype=torch.int64, device=drawn.device)
        accept_token_num = torch.empty(n, dtype=torch.int32, device=drawn.device)
        pointers = (self.store.next_token[idx_mapping], self.store.next_sibling[idx_mapping])
        # A draft cut short by the scheduler is the smaller tree: pointers past its end lead nowhere.
        ops.walk(
            candidates,
            *(torch.where(pointer > count[:, None], -1, pointer) for pointer in pointers),
            count,
            drawn[rows],
            predict,
            accept_index,
            accept_token_num,
        )
        if self.synthetic_length is not None:
            accept_index, accept_token_num = _impose_length(
                self.synthetic_length, count, pos[starts], accept_index, width
            )
            predict = drawn[rows].flatten()
        self._chunks.append(Accepted(accept_index, accept_token_num))
        sampled = predict[accept_index.clamp(min=0)]
        if self._want_logprobs:
            _put_path_first(logits, processed, accept_index, starts, width)
        return processed, sampled, accept_token_num + 1

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


def _join(chunks: list[Accepted], width: int) -> Accepted:
    """Concatenate chunks of requests; each chunk's flat slots start at its own first request."""
    offset, paths = 0, []
    for chunk in chunks:
        index = chunk.accept_index
        paths.append(torch.where(index < 0, index, index + offset * width))
        offset += index.shape[0]
    return Accepted(torch.cat(paths), torch.cat([chunk.accept_token_num for chunk in chunks]))


def _impose_length(
    mean: float, count: torch.Tensor, position: torch.Tensor, accept_index: torch.Tensor, q_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A path of the wanted length instead of the walk's, for benchmarks with dummy weights.

    Its depth is the mean rounded up or down by the root's position, and its nodes are spread over the
    tree, so that the commit moves as many rows as a real path would.
    """
    n, width = accept_index.shape[0], accept_index.shape[1]
    wanted = mean - 1
    # 0.618...: the golden ratio spreads consecutive positions evenly over [0, 1).
    threshold = (position.double() * 0.6180339887498949) % 1.0
    depth = (math.floor(wanted) + (threshold < wanted % 1.0)).clamp(max=width - 1)
    depth = torch.minimum(depth.to(torch.int32), count)
    step = torch.arange(width, device=count.device)
    spread = torch.div(count, depth.clamp(min=1), rounding_mode="floor")
    node = step * spread[:, None]
    slots = torch.arange(n, device=count.device)[:, None] * q_len + node
    return torch.where(step <= depth[:, None], slots, -1), depth


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
