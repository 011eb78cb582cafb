"""Context and tree in one pass over the paged cache, split over the context, with a reduce kernel.

Owns the launch of the fused variant and the kernel that merges its splits. It serves as a check of the
two-part path, as the only path for float32, and as the default wherever it measures faster.
Invariant: the number of splits depends on shapes known to the host only, so a captured graph stays valid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ddtree.kernels.tree_attention import launch

# Beyond 16 partial results per row the reduce pass costs more than it spreads.
MAX_SPLITS = 16


@triton.jit(do_not_specialize=["stride_part_s", "stride_plse_s"])
def reduce_splits_kernel(
    out_ptr,  # [tokens, q heads, D]
    part_ptr,  # [splits, tokens, q heads, D] float32
    part_lse_ptr,  # [splits, tokens, q heads] float32, base 2
    stride_out_t,
    stride_out_h,
    stride_part_s,
    stride_plse_s,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Weighted mean of one (token, head)'s partial results."""
    flat = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    lse = tl.load(part_lse_ptr + splits * stride_plse_s + flat)
    m = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(m == float("-inf"), 0.0, m))
    total = tl.sum(weight, 0)
    part_at = part_ptr + (splits * stride_part_s)[:, None] + flat * D + dims[None, :]
    part = tl.load(part_at, mask=(dims < D)[None, :] & (weight > 0.0)[:, None], other=0.0)
    acc = tl.sum(part * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out_at = out_ptr + (flat // Q_HEADS) * stride_out_t + (flat % Q_HEADS) * stride_out_h + dims
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=dims < D)


def num_splits_for(rows: int, kv_heads: int, num_reqs: int, block_m: int, num_sms: int) -> int:
    """Power-of-two splits that give the device about two programs per multiprocessor."""
    programs = triton.cdiv(rows, block_m) * kv_heads * num_reqs
    wanted = max(1, (2 * num_sms) // programs)
    return min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def paged_tree_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sms: int,
    num_splits: int | None = None,
    block_m: int | None = None,
    **shared,
) -> torch.Tensor:
    """Attention of query rows over context and tree.

    Args:
        q, key_cache, value_cache, num_sms, shared: as in ``tree_attention_``. Requests whose
            ``tree_len`` is not their query length are causal, so prompts can be in the batch too.
        out: [tokens, q heads, D] in fp16, bf16 or float32; rows from ``cu_q[-1]`` on are left undefined.
        num_splits, block_m: force a shape (tests); ``num_splits`` is a power of two.

    Returns:
        ``out``.
    """
    tokens, q_heads, head_size = q.shape
    kv_heads = key_cache.shape[2]
    rows = shared["max_query_len"] * (q_heads // kv_heads)
    wide = q.dtype == torch.float32 or head_size > 128
    if block_m is None:
        block_m = 16 if rows <= 16 else 32 if wide or rows <= 32 else 64 if rows <= 64 else 128
    if num_splits is None:
        num_splits = num_splits_for(rows, kv_heads, shared["num_reqs"], block_m, num_sms)
    part = part_lse = None
    if num_splits > 1:
        part = torch.empty(num_splits, tokens, q_heads, head_size, dtype=torch.float32, device=q.device)
        # Rows beyond cu_q[-1] (padded tokens) stay undefined here and in ``out``; nobody reads them.
        part_lse = torch.empty(num_splits, tokens, q_heads, dtype=torch.float32, device=q.device)
    launch(
        q,
        key_cache,
        value_cache,
        out,
        None,
        part=part,
        part_lse=part_lse,
        num_splits=num_splits,
        block_m=block_m,
        block_n=32 if wide else 64,
        num_warps=8 if block_m == 128 else 4,
        num_stages=2 if wide else 3,
        **shared,
    )
    if num_splits > 1:
        reduce_splits_kernel[(tokens * q_heads,)](
            out,
            part,
            part_lse,
            out.stride(0),
            out.stride(1),
            part.stride(0),
            part_lse.stride(0),
            Q_HEADS=q_heads,
            D=head_size,
            BLOCK_D=triton.next_power_of_2(head_size),
            NUM_SPLITS=num_splits,
            num_warps=2,
        )
    return out
