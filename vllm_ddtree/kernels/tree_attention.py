"""Attention of tree nodes over their own tree, on top of an attention over the context.

Owns the Triton kernel that walks paged keys under an ancestor bit mask. It either continues the online
softmax of a context part computed elsewhere (``tree_attention_``) or also does the context itself
(``paged_tree``). It must not know vLLM.
Invariant: nodes are in topological order, so node i never sees a key behind its own row, and every row
sees at least itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# A mask word holds 32 nodes, so tiles of keys are whole words.
WORD = 32


class Tile(NamedTuple):
    """How one program of the kernel is cut: (query, head) pairs, keys, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Measured on an H200 over 1 to 64 requests and 16 to 256 nodes (docs/gpu-results.md).
SMALL_TILE = Tile(16, 32, 4, 2)
LARGE_TILE = Tile(64, 32, 4, 1)


@triton.jit
def _load_keys(
    head_base,
    table_row,
    pos,
    ok,
    stride_block,
    stride_slot,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows ``pos`` of a paged cache as a [keys, BLOCK_D] tile; rows that are not ``ok`` read as 0."""
    dims = tl.arange(0, BLOCK_D)
    block = tl.load(table_row + pos // PAGE, mask=ok, other=0).to(tl.int64)
    rows = head_base + block * stride_block + (pos % PAGE).to(tl.int64) * stride_slot
    keep = ok[:, None]
    if BLOCK_D != D:
        keep = keep & (dims[None, :] < D)
    return tl.load(rows[:, None] + dims[None, :], mask=keep, other=0.0)


@triton.jit
def _step(acc, m, total, q, k, v, allowed, qk_scale, softcap, v_scale, SOFTCAP: tl.constexpr):
    """One tile of the online softmax, in base 2; a row that has seen no key keeps m = -inf and total = 0."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^(2x) + 1), which saturates instead of overflowing.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    s = tl.where(allowed, s * LOG2E, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, 1)
    pv = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    acc = acc * alpha[:, None] + pv * v_scale
    return acc, m_new, total


@triton.jit(do_not_specialize=["table_tokens", "stride_lse_h", "stride_part_s", "stride_plse_s"])
def tree_attention_kernel(
    out_ptr,  # [tokens, q heads, D]; with SEEDED it also holds the context part
    lse_ptr,  # [q heads, tokens] float32, natural log; read when SEEDED
    q_ptr,  # [tokens, q heads, D]
    k_ptr,  # [blocks, block_size, kv heads, D], any strides but the last
    v_ptr,
    table_ptr,  # [requests, max blocks] int32
    cu_q_ptr,  # [requests + 1] int32
    ctx_ptr,  # [requests] int32
    mask_ptr,  # [requests, q_len, words] int32
    tree_len_ptr,  # [requests] int32
    sinks_ptr,  # [q heads] or unused
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    part_ptr,  # [splits, tokens, q heads, D] float32 when NUM_SPLITS > 1
    part_lse_ptr,  # [splits, tokens, q heads] float32, base 2
    scale,
    softcap,
    table_tokens,  # that a row of the block table has blocks for
    stride_out_t,
    stride_out_h,
    stride_lse_h,
    stride_q_t,
    stride_q_h,
    stride_k_block,
    stride_k_slot,
    stride_k_h,
    stride_v_block,
    stride_v_slot,
    stride_v_h,
    stride_table,
    stride_mask_r,
    stride_mask_q,
    stride_q_scale,
    stride_k_scale,
    stride_v_scale,
    stride_part_s,
    stride_plse_s,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEEDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED_Q: tl.constexpr,
    SCALED_KV: tl.constexpr,
    NON_CAUSAL: tl.constexpr,
):
    """One tile of (query row, head of a group) pairs of one request and KV head, over one context split."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // NUM_SPLITS
    split = tl.program_id(1) % NUM_SPLITS
    req = tl.program_id(2)

    start = tl.load(cu_q_ptr + req)
    n = tl.load(cu_q_ptr + req + 1) - start
    # A tile is BLOCK_M (query, head of the group) pairs, so one load of K and V serves the whole group.
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP
    if tile * BLOCK_M >= n * GROUP:
        return
    live = pair < n * GROUP
    head = kv_head * GROUP + pair % GROUP
    token = (start + row).to(tl.int64)
    ctx = tl.load(ctx_ptr + req)
    # Prompt tokens with drafts behind them are no tree: only a request that is a tree as a whole has a mask.
    tree_rows = tl.where(tl.load(tree_len_ptr + req) == n, n, 0)
    in_tree = live & (row < tree_rows)

    dims = tl.arange(0, BLOCK_D)
    dim_live = live[:, None] & (dims < D)[None, :]
    # K and V may be fp8; the products are done in the output's type, as they are stored exactly in it.
    ty = out_ptr.dtype.element_ty
    q = tl.load(
        q_ptr + token[:, None] * stride_q_t + head[:, None] * stride_q_h + dims[None, :], dim_live, other=0.0
    )
    q = q.to(ty)
    qk_scale = scale
    v_scale = 1.0
    if SCALED_Q:
        qk_scale = qk_scale * tl.load(q_scale_ptr + kv_head * stride_q_scale)
    if SCALED_KV:
        qk_scale = qk_scale * tl.load(k_scale_ptr + kv_head * stride_k_scale)
        v_scale = tl.load(v_scale_ptr + kv_head * stride_v_scale)

    out_at = out_ptr + token[:, None] * stride_out_t + head[:, None] * stride_out_h + dims[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)

    k_head = k_ptr + kv_head.to(tl.int64) * stride_k_h
    v_head = v_ptr + kv_head.to(tl.int64) * stride_v_h
    table_row = table_ptr + req.to(tl.int64) * stride_table

    if SEEDED:
        lse = tl.load(lse_ptr + head.to(tl.int64) * stride_lse_h + token, mask=live, other=float("-inf"))
        # FlashAttention marks a row without keys by -inf or by +inf, and leaves its output undefined.
        seeded = (ctx > 0) & (lse > float("-inf")) & (lse < float("inf"))
        m = tl.where(seeded, lse * LOG2E, float("-inf"))
        total = tl.where(seeded, 1.0, 0.0)
        seed = tl.load(out_at, mask=dim_live, other=0.0).to(tl.float32)
        acc = tl.where(seeded[:, None], seed, 0.0)
    else:
        per_split = tl.cdiv(tl.cdiv(ctx, BLOCK_N), NUM_SPLITS) * BLOCK_N
        lo = split * per_split
        hi = tl.minimum(lo + per_split, ctx)
        for at in tl.range(lo, hi, BLOCK_N):
            pos = at + tl.arange(0, BLOCK_N)
            ok = pos < hi
            k = _load_keys(k_head, table_row, pos, ok, stride_k_block, stride_k_slot, PAGE, D, BLOCK_D)
            v = _load_keys(v_head, table_row, pos, ok, stride_v_block, stride_v_slot, PAGE, D, BLOCK_D)
            acc, m, total = _step(
                acc, m, total, q, k.to(ty), v.to(ty), ok[None, :], qk_scale, softcap, v_scale, SOFTCAP
            )

    if split == NUM_SPLITS - 1:
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=live, other=float("-inf")).to(tl.float32) * LOG2E
            m_new = tl.maximum(m, sink)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m - m_safe)
            total = total * alpha + tl.exp2(sink - m_safe)
            acc = acc * alpha[:, None]
            m = m_new
        # Topological order: keys behind the tile's last query are visible to none of its rows.
        last = n if NON_CAUSAL else tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP + 1, n)
        bits_row = mask_ptr + req.to(tl.int64) * stride_mask_r + row * stride_mask_q
        for at in tl.range(0, last, BLOCK_N):
            j = at + tl.arange(0, BLOCK_N)
            # vLLM's dummy batches at start-up may hold a request that is longer than any real one.
            ok = (j < n) & (ctx + j < table_tokens)
            k = _load_keys(k_head, table_row, ctx + j, ok, stride_k_block, stride_k_slot, PAGE, D, BLOCK_D)
            v = _load_keys(v_head, table_row, ctx + j, ok, stride_v_block, stride_v_slot, PAGE, D, BLOCK_D)
            # One load per row and word: per key it would be 32 times as many.
            word_at = bits_row + at // 32
            words = tl.load(word_at, mask=in_tree, other=0)[:, None]
            for w in tl.static_range(1, BLOCK_N // 32):
                more = tl.load(word_at + w, mask=in_tree & (row * 0 + at + 32 * w < n), other=0)
                words = tl.where((tl.arange(0, BLOCK_N) // 32 == w)[None, :], more[:, None], words)
            ancestor = ((words >> (j % 32)[None, :]) & 1) != 0
            allowed = tl.where(in_tree[:, None], ancestor, j[None, :] <= row[:, None]) & ok[None, :]
            if NON_CAUSAL:
                allowed = (row[:, None] >= 0) & ok[None, :]
            acc, m, total = _step(
                acc, m, total, q, k.to(ty), v.to(ty), allowed, qk_scale, softcap, v_scale, SOFTCAP
            )

    norm = tl.where(total > 0.0, total, 1.0)
    acc = acc / norm[:, None]
    if NUM_SPLITS == 1:
        tl.store(out_at, acc.to(ty), mask=dim_live)
    else:
        q_heads = GROUP * (tl.num_programs(1) // NUM_SPLITS)
        flat = token * q_heads + head
        lse2 = tl.where(total > 0.0, m + tl.log2(norm), float("-inf"))
        part_at = part_ptr + split.to(tl.int64) * stride_part_s + flat[:, None] * D + dims[None, :]
        tl.store(part_at, acc, mask=dim_live)
        tl.store(part_lse_ptr + split.to(tl.int64) * stride_plse_s + flat, lse2, mask=live)


def tile_shape(rows: int, kv_heads: int, num_reqs: int, num_sms: int) -> Tile:
    """Shape of the seeded kernel: the larger tile once it already fills the device.

    Only two shapes exist, so that serving compiles nothing after ``compile_tree_attention``.
    """
    large = triton.cdiv(rows, LARGE_TILE.block_m) * kv_heads * num_reqs >= num_sms
    return LARGE_TILE if large else SMALL_TILE


def scale_stride(scale: torch.Tensor | None) -> int:
    """Stride over KV heads of a quantization scale that is one number or one per KV head."""
    return 0 if scale is None or scale.numel() == 1 else 1


def _check(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("key_cache", key_cache), ("value_cache", value_cache), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"tree attention needs a contiguous last dimension, but {name} has strides "
                f"{tensor.stride()}; pass a view whose head dimension is innermost."
            )
    if q.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"tree attention needs query heads to be a multiple of KV heads, found {q.shape[1]} and "
            f"{key_cache.shape[2]}."
        )


def launch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    ctx: torch.Tensor,
    mask: torch.Tensor,
    tree_len: torch.Tensor,
    max_query_len: int,
    num_reqs: int,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    part: torch.Tensor | None = None,
    part_lse: torch.Tensor | None = None,
    num_splits: int = 1,
    block_m: int = 16,
    block_n: int = WORD,
    num_warps: int = 4,
    num_stages: int = 2,
    non_causal: bool = False,
    compile_only: bool = False,
) -> None:
    """Launch the kernel; see ``tree_attention_`` and ``paged_tree_attention`` for the two uses."""
    _check(q, key_cache, value_cache, out)
    kv_heads = key_cache.shape[2]
    group, head_size = q.shape[1] // kv_heads, q.shape[2]
    scaled = k_scale is not None
    quantized_q = q.dtype.itemsize == 1
    grid = (triton.cdiv(max_query_len * group, block_m), kv_heads * num_splits, num_reqs)
    if compile_only:
        # Triton compiles for an empty grid and launches nothing.
        grid = (0, 1, 1)
    tree_attention_kernel[grid](
        out,
        lse if lse is not None else out,
        q,
        key_cache,
        value_cache,
        block_table,
        cu_q,
        ctx,
        mask,
        tree_len,
        sinks if sinks is not None else out,
        q_scale if quantized_q else out,
        k_scale if scaled else out,
        v_scale if scaled else out,
        part if part is not None else out,
        part_lse if part_lse is not None else out,
        scale,
        softcap,
        block_table.shape[1] * key_cache.shape[1],
        out.stride(0),
        out.stride(1),
        lse.stride(0) if lse is not None else 0,
        q.stride(0),
        q.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        block_table.stride(0),
        mask.stride(0),
        mask.stride(1),
        scale_stride(q_scale),
        scale_stride(k_scale),
        scale_stride(v_scale),
        part.stride(0) if part is not None else 0,
        part_lse.stride(0) if part_lse is not None else 0,
        PAGE=key_cache.shape[1],
        GROUP=group,
        D=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SEEDED=lse is not None,
        NUM_SPLITS=num_splits,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        SCALED_Q=quantized_q,
        SCALED_KV=scaled,
        NON_CAUSAL=non_causal,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def tree_attention_(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    num_sms: int,
    tile: Tile | None = None,
    **shared,
) -> torch.Tensor:
    """Continue an attention over the context with the tree's own keys, in place.

    Args:
        q: [tokens, q heads, D] fp16, bf16, float32 or fp8 (then with ``q_scale``).
        key_cache, value_cache: [blocks, block_size, kv heads, D] views with any outer strides; key j of
            request r is at position ``ctx[r] + j`` of its block table row.
        out: [tokens, q heads, D], the normalised attention over the context, overwritten by the result.
        lse: [q heads, tokens] float32, the context's log-sum-exp; -inf or +inf where the context is empty.
        num_sms: multiprocessors of the device, for the tile shape.
        tile: force a shape (tests).
        shared: ``block_table`` [R, max blocks] int32, ``cu_q`` [R + 1] int32, ``ctx`` [R] int32, ``mask``
            [>= R, q_len, words] int32 with bit j of row i set iff j is i or its ancestor, ``tree_len``
            [>= R] int32 (a request whose query length differs is causal),
            ``max_query_len``, ``num_reqs``, ``scale``, and
            optionally ``softcap``, ``sinks`` (not in the context part), ``q_scale``, ``k_scale``, ``v_scale``
            (one number or one per KV head, on the device), ``non_causal`` (every row sees every row).

    Returns:
        ``out``. Nothing is read back to the host.

    Raises:
        ValueError: a last dimension is strided, or heads don't divide.
    """
    kv_heads = key_cache.shape[2]
    rows = shared["max_query_len"] * (q.shape[1] // kv_heads)
    tile = tile or tile_shape(rows, kv_heads, shared["num_reqs"], num_sms)
    launch(q, key_cache, value_cache, out, lse, **tile._asdict(), **shared)
    return out


def compile_tree_attention(q, key_cache, value_cache, out, lse, **shared) -> None:
    """Compile every tile shape of ``tree_attention_`` for these arguments without running one."""
    for tile in (SMALL_TILE, LARGE_TILE):
        launch(q, key_cache, value_cache, out, lse, **tile._asdict(), compile_only=True, **shared)
