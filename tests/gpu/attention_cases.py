"""Paged batches with random trees, and what attention over them must be, in float32 PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Case:
    """A ragged batch over a paged cache; ``visible[r]`` is the [n, n] bool ancestor matrix of request r."""

    q: torch.Tensor  # [tokens, q heads, D]
    key_cache: torch.Tensor  # [blocks, block_size, kv heads, D]
    value_cache: torch.Tensor
    block_table: torch.Tensor
    cu_q: torch.Tensor
    ctx: torch.Tensor
    mask: torch.Tensor
    tree_len: torch.Tensor
    visible: list[torch.Tensor]
    lens: list[int]
    ctx_list: list[int]
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0

    def shared(self) -> dict:
        """Keyword arguments common to both kernels."""
        return {
            "block_table": self.block_table,
            "cu_q": self.cu_q,
            "ctx": self.ctx,
            "mask": self.mask,
            "tree_len": self.tree_len,
            "max_query_len": max(self.lens),
            "num_reqs": len(self.lens),
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }


def pack_rows(visible: torch.Tensor, words: int) -> torch.Tensor:
    """Bool [n, n] to int32 [n, words] bit rows."""
    n = visible.shape[0]
    bits = torch.zeros(n, words * 32, dtype=torch.int64)
    bits[:, :n] = visible.long()
    packed = (bits.view(n, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def random_tree(n: int, generator: torch.Generator) -> torch.Tensor:
    """Ancestor matrix of a random tree of n nodes in topological order, root included."""
    visible = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        parent = int(torch.randint(0, i, (), generator=generator))
        visible[i] |= visible[parent]
    return visible


def make_case(
    trees: list[int],
    contexts: list[int],
    *,
    group: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: str,
    q_len: int | None = None,
    block_size: int = 16,
    layout: str = "HND",
    query_lens: list[int] | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    """Request r has ``query_lens[r]`` rows over ``contexts[r]`` keys: a tree if as many as ``trees[r]``."""
    g = torch.Generator().manual_seed(seed)
    lens = query_lens or [max(t, 1) for t in trees]
    q_len = q_len or max(max(trees), 1)
    words = -(-q_len // 32)
    rows, heads = len(lens), group * kv_heads
    width = max(-(-(c + n) // block_size) for c, n in zip(contexts, lens, strict=True)) + 1
    num_blocks = rows * width + 3
    # vLLM keeps K and V of a token side by side; the physical order of heads and slots is the layout.
    if layout == "HND":
        raw = torch.randn(num_blocks, kv_heads, block_size, 2 * head_size, generator=g)
        raw = raw.to(device, dtype).transpose(1, 2)
    else:
        raw = torch.randn(num_blocks, block_size, kv_heads, 2 * head_size, generator=g).to(device, dtype)
    key_cache, value_cache = raw.split(head_size, dim=-1)
    table = torch.randperm(num_blocks, generator=g)[: rows * width].view(rows, width).to(torch.int32)
    # Garbage bits in unused rows and words must not matter.
    mask = torch.randint(-(2**31), 2**31, (rows + 1, q_len, words), generator=g).to(torch.int32)
    visible = []
    for r, (t, n) in enumerate(zip(trees, lens, strict=True)):
        tree = random_tree(t, g) if t else torch.zeros(0, 0, dtype=torch.bool)
        full = tree if t == n else torch.tril(torch.ones(n, n, dtype=torch.bool))
        mask[r, :t] = pack_rows(tree, words)
        visible.append(full)
    cu_q = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    return Case(
        q=torch.randn(sum(lens), heads, head_size, generator=g).to(device, dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table.to(device),
        cu_q=cu_q.to(device),
        ctx=torch.tensor(contexts, dtype=torch.int32, device=device),
        mask=mask.to(device),
        tree_len=torch.tensor([*trees, 0], dtype=torch.int32, device=device),
        visible=visible,
        lens=lens,
        ctx_list=contexts,
        scale=head_size**-0.5,
        softcap=softcap,
        sinks=torch.randn(heads, generator=g).to(device) if sinks else None,
    )


def request_kv(case: Case, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [keys, kv heads, D] K and V of request r, context first, descaled."""
    pos = torch.arange(case.ctx_list[r] + case.lens[r], device=case.q.device)
    size = case.key_cache.shape[1]
    block = case.block_table[r, pos // size].long()

    def rows(cache: torch.Tensor) -> torch.Tensor:
        # Not every torch indexes fp8 tensors, but all index their bytes.
        raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        return raw[block, pos % size].view(cache.dtype).float()

    return rows(case.key_cache) * case.k_scale, rows(case.value_cache) * case.v_scale


def expected(case: Case, *, context_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 output [tokens, q heads, D] and natural-log lse [q heads, tokens] of the definition.

    With ``context_only`` the tree's keys and the sinks are left out; a row without keys has output NaN
    (kernels must not read it) and lse -inf for even requests, +inf for odd ones, as both occur.
    """
    heads, head_size = case.q.shape[1:]
    outs, lses = [], []
    start = 0
    for r, n in enumerate(case.lens):
        k, v = request_kv(case, r)
        c = case.ctx_list[r]
        group = heads // k.shape[1]
        q = case.q[start : start + n].float() * case.q_scale
        start += n
        if context_only:
            k, v = k[:c], v[:c]
            if c == 0:
                outs.append(torch.full((n, heads, head_size), math.nan, device=q.device))
                lses.append(torch.full((heads, n), -math.inf if r % 2 == 0 else math.inf, device=q.device))
                continue
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", q, k) * case.scale
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        if not context_only:
            hidden = ~case.visible[r].to(q.device)
            s[:, :, c:] = s[:, :, c:].masked_fill(hidden, -math.inf)
            if case.sinks is not None:
                s = torch.cat([s, case.sinks.float()[:, None, None].expand(-1, n, 1)], -1)
                v = torch.cat([v, torch.zeros_like(v[:1])])
        lses.append(s.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v))
    return torch.cat(outs), torch.cat(lses, 1)
