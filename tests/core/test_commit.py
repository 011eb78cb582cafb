"""Planning and doing row moves: overlapping moves, all element sizes, strides and block sizes."""

from __future__ import annotations

import pytest
import torch
from core_trees import junk, need_kernels, same, to
from hypothesis import given
from hypothesis import strategies as st

from vllm_ddtree import ops, reference


def paths(seed, n, q, depth):
    """accept_index rows: the root, then ascending local nodes, of any accepted length."""
    rng = torch.Generator().manual_seed(seed)
    accept = torch.full((n, depth + 1), -1, dtype=torch.int64)
    for r in range(n):
        most = min(depth, q - 1)
        length = int(torch.randint(0, most + 1, (1,), generator=rng))
        nodes = 1 + torch.randperm(q - 1, generator=rng)[:length].sort().values
        accept[r, : length + 1] = r * q + torch.cat([torch.zeros(1, dtype=torch.int64), nodes])
    return accept


def run_plan(device, accept, start, q, slots):
    n, depth = accept.shape[0], accept.shape[1] - 1
    out = [junk(n, depth, dtype=torch.int64, device=device) for _ in range(2)]
    accept, start, slots = to(device, accept, start, slots)
    ops.plan_moves(accept, start, q, slots, *out)
    return out


@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(2, 20),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
)
def test_plan(device, seed, n, q, depth, wide, short):
    accept = paths(seed, n, q, depth)
    rng = torch.Generator().manual_seed(seed + 1)
    start = (torch.arange(n) * q).to(torch.int64 if wide else torch.int32)
    start[torch.rand(n, generator=rng) < 0.25] = -1
    total = n * q - (q // 2 if short else 0)  # the last request may own fewer rows than a full tree
    slots = torch.randperm(3 * n * q, generator=rng)[:total]
    slots[torch.rand(total, generator=rng) < 0.1] = -1
    src, dst = (t.cpu() for t in run_plan(device, accept, start, q, slots))
    same((src, dst), reference.plan_moves(accept, start, q, slots))
    for r in range(n):
        for d in range(1, depth + 1):
            expected = (-1, -1)
            if accept[r, d] >= 0 and start[r] >= 0:
                rows = int(start[r]) + int(accept[r, d]) % q, int(start[r]) + d
                if max(rows) < total:
                    a, b = int(slots[rows[0]]), int(slots[rows[1]])
                    expected = (a, b) if a != b and a >= 0 and b >= 0 else (-1, -1)
            assert (int(src[r, d - 1]), int(dst[r, d - 1])) == expected


def test_plan_of_hidden_rows(device):
    accept = torch.tensor([[0, 2, 3, -1], [5, 6, -1, -1]])
    start = torch.tensor([0, 10], dtype=torch.int32)
    src, dst = run_plan(device, accept, start, 5, torch.arange(15))
    assert src.tolist() == [[2, 3, -1], [-1, -1, -1]]  # request 1 accepted node 1, which is already in place
    assert dst.tolist() == [[1, 2, -1], [-1, -1, -1]]


def bytes_view(seed, shape, dtype, device, order=(0, 1, 2, 3), cut=0):
    """A 4-D view of random bytes: stored in `order`, and `cut` elements into each head, which spoils
    alignment."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    stored = [shape[i] for i in order]
    stored[-1] += cut
    raw = torch.randint(0, 255, (*stored[:-1], stored[-1] * size), generator=rng, dtype=torch.uint8).to(
        device
    )
    whole = raw.view(dtype)[..., cut:]
    return whole.permute(*[order.index(i) for i in range(4)])


def as_bytes(view):
    return view.cpu().contiguous().view(torch.uint8)


def moves(seed, n, rows, depth):
    """Random moves inside disjoint sets of rows: they overlap freely within a request, with some skipped."""
    rng = torch.Generator().manual_seed(seed)
    own = torch.randperm(rows, generator=rng)[: rows // n * n].view(n, -1)
    pick = [own.gather(1, torch.randint(0, own.shape[1], (n, depth), generator=rng)) for _ in range(2)]
    for side in pick:
        side[torch.rand(side.shape, generator=rng) < 0.15] = -1
    return pick


DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_moves(device, dtype, seed):
    n, rows = 3, 48
    views = [
        bytes_view(seed, (3, 16, 2, 16), dtype, device),
        bytes_view(seed + 10, (6, 8, 3, 5), dtype, device),  # odd row sizes: narrow chunks
        bytes_view(seed + 20, (12, 4, 2, 8), dtype, device, order=(0, 2, 1, 3)),  # heads before slots
        bytes_view(seed + 30, (3, 16, 1, 33), dtype, device, cut=1),  # misaligned
        bytes_view(seed + 40, (24, 2, 4, 64), dtype, device, order=(1, 0, 2, 3)),
    ]
    src, dst = moves(seed, n, rows, 9)
    expected = []
    for view in views:
        size = view.shape[1]
        copy = as_bytes(view).clone()
        for r in range(n):
            for a, b in zip(src[r].tolist(), dst[r].tolist(), strict=True):
                if a >= 0 and b >= 0:
                    copy[b // size, b % size] = copy[a // size, a % size]
        expected.append(copy)
    same([as_bytes(v) for v in reference.move_rows(views, src.to(device), dst.to(device))], expected)
    ops.move_rows(views, ops.make_move_table(views), *to(device, src, dst))
    same([as_bytes(v) for v in views], expected)


def test_real_paths_move_as_if_read_first(device):
    """Accepted nodes move forward only (local_d >= d), so no row is read after it was written."""
    q, depth = 12, 8
    accept = paths(4, 5, q, depth)
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    src, dst = run_plan(device, accept, torch.arange(5) * q, q, slots)
    view = bytes_view(1, (15, 4, 2, 8), torch.float16, device)
    before = as_bytes(view).view(60, -1).clone()
    ops.move_rows([view], ops.make_move_table([view]), src, dst)
    after = as_bytes(view).view(60, -1)
    untouched = set(range(60)) - set(dst.flatten().tolist())
    assert all(torch.equal(after[i], before[i]) for i in untouched)
    assert bool((src >= 0).any())
    for a, b in zip(src.flatten().tolist(), dst.flatten().tolist(), strict=True):
        assert a < 0 or torch.equal(after[b], before[a])


def test_more_moves_than_a_batch_or_a_warp(device):
    view = bytes_view(2, (10, 16, 8, 128), torch.bfloat16, device)
    src, dst = moves(9, 2, 160, 70)
    expected = reference.move_rows([view], src.to(device), dst.to(device))
    ops.move_rows([view], ops.make_move_table([view]), *to(device, src, dst))
    same([as_bytes(view)], [as_bytes(expected[0])])


def test_table_refuses_what_it_cannot_move():
    good = torch.zeros(2, 4, 1, 8)
    with pytest.raises(ValueError, match="last dimension contiguous"):
        ops.make_move_table([good, good.transpose(2, 3).expand(2, 4, 8, 4)])
    with pytest.raises(ValueError, match="at least one view"):
        ops.make_move_table([])
    assert ops.make_move_table([good]).tolist() == [[good.data_ptr(), 2, 4, 128, 32, 32, 1, 32]]


def test_cpu_refuses_rows_outside():
    need_kernels("cpu")
    view = torch.zeros(2, 4, 1, 8)
    far = torch.tensor([[8]])
    with pytest.raises(RuntimeError, match="rows below 8"):
        ops.move_rows([view], ops.make_move_table([view]), far, torch.zeros_like(far))
