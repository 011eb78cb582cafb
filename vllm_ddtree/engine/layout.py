"""How vLLM lays a layer's KV cache out, seen as rows that can be moved.

Owns the mapping from a cache tensor to a 4-D view [num_blocks, block_size, heads, elements] with a
contiguous last dimension. Invariant: the view covers every byte of a token's cache row.
"""

from __future__ import annotations

from typing import Any

import torch


def cache_rows(layer: Any) -> torch.Tensor:
    """Return the row view of an attention layer's KV cache.

    Every layout of vLLM 0.32 and 0.33 is a permutation of [blocks, heads, block, K|V] in memory and has
    that logical shape (vllm/v1/kv_cache_layout.py), so one transpose is enough.

    Args:
        layer: vLLM's Attention module, after its cache was bound.

    Raises:
        ValueError: the cache has a shape that ddtree doesn't know.
    """
    cache = layer.kv_cache
    heads, size = layer.num_kv_heads, layer.head_size
    if cache.dim() != 4 or cache.shape[1] != heads or cache.shape[3] != 2 * size:
        raise ValueError(
            f"ddtree needs a KV cache of shape [blocks, {heads}, block, {2 * size}], found "
            f"{tuple(cache.shape)}: it would not know which bytes to move with the accepted path. Use the "
            "default attention backend and KV dtype."
        )
    return cache.transpose(1, 2)
