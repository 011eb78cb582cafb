"""The same attention through xformers, over dense keys: a check by other people's kernels.

Owns the call into ``xformers.ops.tree_attention`` and its parts. xformers' paged kernels need pages that
are a multiple of 64 tokens and one tree for the whole batch, so this gathers K and V and takes the trees
of a batch as one additive bias per request.
Invariant: contexts are at least one token (an empty block-diagonal part is not defined there).
"""

from __future__ import annotations

import torch


def gather_kv(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """Return [R, length, kv heads, D]: the first ``length`` positions of each request, contiguous."""
    pos = torch.arange(length, device=cache.device)
    block_size = cache.shape[1]
    return cache[block_table[:, pos // block_size].long(), pos % block_size]


def tree_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive bias of a bool mask [..., n, n]; rows are padded to 8 elements, as the kernels want."""
    n = visible.shape[-1]
    bias = torch.full(
        (*visible.shape[:-1], -(-n // 8) * 8), float("-inf"), dtype=dtype, device=visible.device
    )
    bias[..., :n].masked_fill_(visible, 0.0)
    return bias[..., :n]


def xformers_tree_attention(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    tree_k: torch.Tensor,
    tree_v: torch.Tensor,
    prefix_bias,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Attention of R trees of n nodes each.

    Args:
        q: [R, n, q heads, D].
        context_k, context_v: [R, padded length, kv heads, D].
        tree_k, tree_v: [R, n, kv heads, D].
        prefix_bias: xformers' BlockDiagonalPaddedKeysMask with n queries and the context length per request.
        bias: [n, n] for one tree shared by all (``xformers.ops.tree_attention``), or [R, n, n].

    Returns:
        [R, n, q heads, D]. The scale is 1 / sqrt(D).
    """
    from xformers.ops import fmha
    from xformers.ops.fmha import common
    from xformers.ops.tree_attention import tree_attention

    # xformers refuses every CUDA op when its C++ library doesn't load (0.0.35 is built for torch 2.10 and
    # CUDA 12.8). Split-K is written in Triton and needs none of that library.
    common._built_with_cuda = True
    split_k = fmha.triton_splitk.FwOp

    requests, n, q_heads, head_size = q.shape
    kv_heads = context_k.shape[2]
    group = q_heads // kv_heads

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(3).expand(*x.shape[:3], group, head_size)

    q5 = q.view(requests, n, kv_heads, group, head_size)
    parts = [grouped(x) for x in (tree_k, tree_v, context_k, context_v)]
    if bias.dim() == 2:
        out = tree_attention(q5, *parts, bias, prefix_bias, prefix_op=split_k)
        return out.reshape(requests, n, q_heads, head_size)
    spec_k, spec_v, cache_k, cache_v = parts
    padded = cache_k.shape[1]
    prefix, prefix_lse = fmha.memory_efficient_attention_partial(
        q5.view(1, requests * n, kv_heads, group, head_size),
        cache_k.view(1, requests * padded, kv_heads, group, head_size),
        cache_v.view(1, requests * padded, kv_heads, group, head_size),
        attn_bias=prefix_bias,
        op=split_k,
    )
    suffix, suffix_lse = fmha.memory_efficient_attention_forward_requires_grad(
        q5,
        spec_k,
        spec_v,
        attn_bias=bias[:, None, None].expand(requests, kv_heads, group, n, n),
        op=split_k,
    )
    out, _ = fmha.merge_attentions(
        [prefix.view(requests, n, kv_heads, group, head_size), suffix],
        [prefix_lse.view(kv_heads, group, requests, n).permute(2, 0, 1, 3), suffix_lse],
        output_dtype=q.dtype,
    )
    return out.reshape(requests, n, q_heads, head_size)
