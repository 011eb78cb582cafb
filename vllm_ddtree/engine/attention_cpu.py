"""Tree attention on a CPU, in plain PyTorch over a plain cache layout.

A subclass of vLLM's CPU backend that serves every layer of a ddtree engine: causal rows, the drafter's
non-causal block and verified trees. It is the clear version of what attention_gpu does fast, and must
agree with it. Invariant: a tree row sees its context, itself and its ancestors, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_ddtree.engine.state import tree_state

# What the bytes of a quantized cache are, by vLLM's name of it.
_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Backend class that vLLM resolves instead of CPU_ATTN in a ddtree worker."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        """Return the implementation."""
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        """Return the metadata builder."""
        return TreeCPUAttentionMetadataBuilder


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the same metadata without the packed kernel's schedule."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Collect lengths, block table and causality of one step."""
        common = common_attn_metadata
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            causal=common.causal,
        )


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention over a cache of [blocks, heads, block, K|V] rows, stored as they are or as fp8 codes."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend one step; shapes as in vLLM's CPU backend."""
        if attn_metadata is None:
            return output
        step = None if getattr(layer, "is_draft_layer", False) else tree_state()
        k_scale, v_scale = self._scales(layer)
        starts = attn_metadata.query_start_loc.tolist()
        for row, seq_len in enumerate(attn_metadata.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            if end <= begin:
                continue
            keys, values = self._gather(kv_cache, attn_metadata.block_table[row], seq_len)
            mask = self._mask(step, row, end - begin, seq_len, attn_metadata.causal)
            attended = F.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1)[None],
                keys.to(query.dtype)[None],
                values.to(query.dtype)[None],
                attn_mask=mask,
                scale=self.scale * k_scale,
                enable_gqa=True,
            )
            if v_scale != 1.0:
                attended = attended * v_scale
            output[begin:end] = attended[0].transpose(0, 1).reshape(output[begin:end].shape)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store keys and values [tokens, heads, size] at their slots; slot -1 stores nothing."""
        slots = slot_mapping[: key.shape[0]]
        keep = slots >= 0
        slots = slots[keep]
        block, offset = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        rows = [
            self._code(part[: len(keep)][keep], scale)
            for part, scale in zip((key, value), self._scales(layer), strict=True)
        ]
        kv_cache[block, :, offset] = torch.cat(rows, dim=-1)

    def _scales(self, layer: Any) -> tuple[float, float]:
        """What keys and values were divided by before they were stored."""
        if self.kv_cache_dtype not in _FP8:
            return 1.0, 1.0
        return layer._k_scale_float, layer._v_scale_float

    def _code(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        """Rows as the cache holds them.

        For fp8 vLLM's CPU kernel rounds towards zero and saturates; another rounding would be another text.
        """
        kind = _FP8.get(self.kv_cache_dtype)
        if kind is None:
            return rows
        limit = torch.finfo(kind).max
        scaled = (rows.float() * (1 / torch.tensor(scale))).clamp(-limit, limit)
        nearest = scaled.to(kind)
        # Codes of one sign are in order of size, so the next one towards zero is one less.
        return nearest.view(torch.uint8) - (nearest.float().abs() > scaled.abs()).to(torch.uint8)

    def _gather(self, kv_cache: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, ...]:
        size = kv_cache.shape[2]
        rows = kv_cache[blocks[: -(-seq_len // size)].long()].transpose(0, 1)
        rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, :seq_len]
        if self.kv_cache_dtype in _FP8:
            rows = rows.view(_FP8[self.kv_cache_dtype])
        return rows.chunk(2, dim=-1)

    def _mask(self, step: Any, row: int, query_len: int, seq_len: int, causal: bool) -> torch.Tensor | None:
        """Which keys each query row sees, [query_len, seq_len] bool; None for all."""
        if not causal:
            return None
        context = seq_len - query_len
        mask = torch.ones(query_len, seq_len, dtype=torch.bool)
        tree = step is not None and row < step.num_tree_reqs and int(step.tree_len[row]) == query_len
        own = (
            _unpack(step.mask[row, :query_len], query_len)
            if tree
            else mask.new_ones(query_len, query_len).tril()
        )
        mask[:, context:] = own
        return mask


def _unpack(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Bit rows [count, words] int32 as [count, count] bool."""
    bits = (rows[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.reshape(rows.shape[0], -1)[:, :count].bool()
