"""Host arithmetic of the GPU tree attention: which rows go where, and how often a context is split.

Owns decisions made from shapes that the host knows exactly; it must not read the device.
Invariant: equal shapes give equal decisions, so a captured graph and its replays agree.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

# FlashAttention 3 packs the query heads of a KV head into query tiles of this many rows.
_FA_TILE_M = 128


def plan_rows(query_start_loc: torch.Tensor, q_len: int, num_tree_reqs: int) -> tuple[int, int]:
    """Decide how many leading rows go through the tree kernel.

    A function of host shapes alone: a batch in which no row is wider than a tree goes there as a whole
    (rows without a tree are causal in the kernel), because it may be the replay of a FULL graph.

    Args:
        query_start_loc: [R + 1] int32 on the host; rows padded for a graph are empty.
        q_len: widest row that can be a tree.
        num_tree_reqs: leading rows that are verified as trees, used when wider rows follow.

    Returns:
        (rows, their widest query length); (0, 0) when vLLM's own path does the whole batch.
    """
    starts = query_start_loc.tolist()
    lens = [b - a for a, b in itertools.pairwise(starts)]
    if max(lens) > q_len:
        first_wide = next(r for r, n in enumerate(lens) if n > q_len)
        lens = lens[: min(num_tree_reqs, first_wide)]
    widest = max(lens, default=0)
    # One query row per request is plain decoding: its tree is the root, which vLLM attends just as well.
    return (len(lens), widest) if widest > 1 else (0, 0)


def split_bound(
    num_reqs: int, max_query_len: int, q_heads: int, kv_heads: int, num_sms: int, limit: int
) -> int:
    """Upper bound of FlashAttention's KV splits, from shapes that a captured graph shares with its replay.

    FlashAttention keeps [splits, tokens, heads, D] float32 partial results; at tree widths the default of
    32 splits is gigabytes, while a few tiles per multiprocessor already hide ragged contexts.
    """
    if limit <= 1:
        return limit
    tiles = num_reqs * -(-max_query_len * (q_heads // kv_heads) // _FA_TILE_M) * kv_heads
    return max(1, min(limit, -(-4 * num_sms // max(tiles, 1))))


def slice_rows(
    common: CommonAttentionMetadata,
    first: int,
    last: int,
    first_token: int,
    last_token: int,
    max_query_len: int,
    ctx: torch.Tensor | None = None,
) -> CommonAttentionMetadata:
    """Rows [first, last) as a batch of their own; with ``ctx``, over their contexts only and non-causal."""
    starts, starts_cpu = common.query_start_loc, common.query_start_loc_cpu
    if first:
        starts, starts_cpu = starts - first_token, starts_cpu - first_token
    return replace(
        common,
        query_start_loc=starts[first : last + 1],
        query_start_loc_cpu=starts_cpu[first : last + 1],
        seq_lens=common.seq_lens[first:last] if ctx is None else ctx[first:last],
        num_reqs=last - first,
        num_actual_tokens=last_token - first_token,
        max_query_len=max_query_len,
        block_table_tensor=common.block_table_tensor[first:last],
        slot_mapping=common.slot_mapping[first_token:last_token],
        causal=common.causal if ctx is None else False,
    )
