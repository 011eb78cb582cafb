"""Random trees and small helpers for the core tests. Knows only the tree conventions, nothing of the
kernels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from vllm_ddtree import ops, reference


def draft(seed: int, n: int, depth: int, ranks: int, step: float, holes: float) -> tuple[Tensor, Tensor]:
    """Descending top_logps with absent tails and distinct top_tokens; step > 0 rounds scores so that many
    tie."""
    rng = torch.Generator().manual_seed(seed)
    logps = -(torch.rand(n, depth, ranks, generator=rng) * 3).cumsum(-1)
    if step:
        logps = torch.round(logps / step) * step
    tail = (torch.rand(n, depth, 1, generator=rng) < holes) & (torch.arange(ranks) > ranks // 2)
    logps[tail.expand_as(logps)] = -math.inf
    nan_row = torch.rand(n, depth, generator=rng) < holes / 2
    logps[..., -1][nan_row] = math.nan
    ids = torch.rand(n, depth, ranks + 5, generator=rng).argsort(-1)[..., :ranks]
    return logps, ids.to(torch.int64).contiguous()


@st.composite
def batches(draw, max_nodes: int = 40) -> tuple[Tensor, Tensor, Tensor, int]:
    """(top_logps, top_tokens, budgets, N): ragged budgets around 0 and N, ties, absent and NaN entries."""
    nodes = draw(st.integers(0, max_nodes))
    n = draw(st.integers(1, 4))
    budgets = draw(
        st.lists(
            st.one_of(st.sampled_from([-1, 0, 1, nodes, nodes + 3]), st.integers(0, nodes)),
            min_size=n,
            max_size=n,
        )
    )
    logps, ids = draft(
        draw(st.integers(0, 2**31)), n, draw(st.integers(1, 6)), draw(st.integers(1, 9)),
        draw(st.sampled_from([0.0, 0.5, 2.0, 100.0])), draw(st.sampled_from([0.0, 0.3])),
    )  # fmt: skip
    return logps, ids, torch.tensor(budgets, dtype=torch.int32), nodes


def need_kernels(device: str) -> None:
    if not ops.has_kernels(device):
        pytest.skip(
            f"compares kernels with the reference, and none serve {device}: {ops.kernels_error(device)}"
        )


def to(device: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def same(actual, expected) -> None:
    """Bit-exact, dtype included."""
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            a.cpu(), e.cpu(), rtol=0, atol=0, equal_nan=True, msg=lambda text, i=i: f"output {i}: {text}"
        )


def junk(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """An output buffer full of a value that no op writes: what stays unwritten shows."""
    return torch.full(shape, 77, dtype=dtype, device=device)


def run_build(device: str, logps: Tensor, ids: Tensor, budgets: Tensor, nodes: int) -> list[Tensor]:
    n, q = logps.shape[0], nodes + 1
    out = [junk(n, q, dtype=t, device=device) for t in (torch.int64, torch.int32, torch.int32, torch.float32)]
    out.append(junk(n, dtype=torch.int32, device=device))
    ops.build(*to(device, logps, ids, budgets), *out)
    return out


def run_retrieve(device: str, parents: Tensor, num_nodes: Tensor) -> list[Tensor]:
    out = [junk(*parents.shape, dtype=t, device=device) for t in (torch.int64, torch.int32, torch.int32)]
    ops.retrieve(*to(device, parents, num_nodes), *out)
    return out


def walk_outputs(device: str, n: int, q: int, depth: int) -> list[Tensor]:
    return [
        junk(n * q, dtype=torch.int64, device=device),
        junk(n, depth + 1, dtype=torch.int64, device=device),
        junk(n, dtype=torch.int32, device=device),
    ]


def random_trees(seed: int, n: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, parents, num_nodes) of any ancestor-closed shape, not only those a builder makes; sizes
    differ."""
    rng = torch.Generator().manual_seed(seed)
    parents = torch.full((n, nodes + 1), -1, dtype=torch.int32)
    sizes = torch.randint(0, nodes + 1, (n,), generator=rng, dtype=torch.int32)
    sizes[0] = nodes
    for r in range(n):
        for i in range(1, int(sizes[r]) + 1):
            low = max(0, i - 1 - int(torch.randint(0, 6, (1,), generator=rng)))
            parents[r, i] = torch.randint(low, i, (1,), generator=rng)
    tokens = torch.randint(0, 5, (n, nodes + 1), generator=rng)  # few ids, so that siblings repeat
    return tokens, parents, sizes


def children_of(parents: Tensor, count: int, node: int) -> list[int]:
    return [i for i in range(1, count + 1) if int(parents[i]) == node]


__all__ = [
    "batches", "children_of", "draft", "junk", "need_kernels", "random_trees", "reference", "run_build",
    "run_retrieve", "same", "to", "walk_outputs",
]  # fmt: skip
