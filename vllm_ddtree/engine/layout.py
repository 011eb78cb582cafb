"""How vLLM lays a layer's KV cache out, seen as rows that can be moved.

Owns the mapping from a cache tensor to 4-D views [num_blocks, block_size, heads, elements] with a
contiguous last dimension. Invariant: the views of a layer cover every byte of a token's cache row.
"""

from __future__ import annotations

from typing import Any

import torch


def cache_rows(layer: Any) -> list[torch.Tensor]:
    """Return the row views of an attention layer's KV cache.

    Args:
        layer: vLLM's Attention module, after its cache was bound.

    Raises:
        ValueError: the cache has a layout that ddtree doesn't know.
    """
    cache = layer.kv_cache
    if isinstance(cache, (list, tuple)):
        cache = cache[0]
    heads, size = layer.num_kv_heads, layer.head_size
    if cache.dim() == 4 and cache.shape[-1] == 2 * size:
        # [blocks, heads, block, K|V] (vLLM's head-major interior) or [blocks, block, heads, K|V].
        rows = cache.transpose(1, 2) if cache.shape[1] == heads else cache
        return [rows]
    if cache.dim() == 5:
        # K and V are the dimension of length 2 right after or before the blocks.
        pairs = cache.unbind(1 if cache.shape[1] == 2 else 0)
        return [pair if pair.shape[2] == heads else pair.transpose(1, 2) for pair in pairs]
    raise ValueError(
        f"ddtree can't move rows of a KV cache of shape {tuple(cache.shape)} ({heads} heads of {size}); "
        "use the default attention backend."
    )
