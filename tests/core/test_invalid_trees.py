"""Ops given what no builder makes: a clear error or a defined harmless result, the same from kernel and
reference, and always an end."""

from __future__ import annotations

import math

import pytest
import torch
from core_trees import draft, junk, need_kernels, random_trees, same, to, walk_outputs
from hypothesis import given
from hypothesis import strategies as st

from vllm_ddtree import ops, reference

ERRORS = (RuntimeError, ValueError, IndexError)
SMALL = st.integers(-3, 9)
INT32 = st.one_of(SMALL, st.sampled_from([-(2**31), 2**31 - 1, 1000]))
INT64 = st.one_of(SMALL, st.sampled_from([-(2**63), 2**63 - 1, 2**31, 1 << 40]))
FLOATS = st.one_of(
    st.floats(-4, 4, width=32), st.sampled_from([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e30, -1e-40])
)
Q = 7


def tensor(draw, values, shape, dtype):
    count = math.prod(shape)
    return torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype).reshape(shape)


def result(call, *args):
    """What a call gives: its tensors, or the text of its error."""
    try:
        return call(*args)
    except ERRORS as error:
        return str(error)


def compare(device, kernel, definition):
    """Kernels on a CPU answer as the reference does; on a GPU they only must come back."""
    if device != "cpu":
        torch.cuda.synchronize()
        return
    assert isinstance(kernel, str) == isinstance(definition, str), (kernel, definition)
    if isinstance(kernel, str):
        # The requirement, what was found, what to do: never a bare "index out of range".
        assert "found" in kernel and len(kernel) > 60, kernel
    else:
        same(kernel, definition)


@st.composite
def spoilt_trees(draw):
    """(tokens, parents, num_nodes): a good tree with any number of bad entries in it."""
    n = draw(st.integers(1, 3))
    tokens, parents, counts = random_trees(draw(st.integers(0, 2**31)), n, Q - 1)
    for _ in range(draw(st.integers(0, 4))):
        row, slot = draw(st.integers(0, n - 1)), draw(st.integers(0, Q - 1))
        kind = draw(st.sampled_from(["parent", "self", "later", "padding inside", "count", "token"]))
        if kind == "parent":
            parents[row, slot] = draw(INT32)
        elif kind == "self":
            parents[row, slot] = slot
        elif kind == "later":
            parents[row, slot] = Q - 1
        elif kind == "padding inside":
            parents[row, slot] = -1
        elif kind == "count":
            counts[row] = draw(INT32)
        else:
            tokens[row, slot] = draw(INT64)
    return tokens, parents, counts


@given(spoilt_trees())
def test_derived_forms(device, tree):
    need_kernels(device)
    _, parents, counts = tree
    n = parents.shape[0]

    def pointers(p, c):
        out = [junk(n, Q, dtype=t, device=device) for t in (torch.int64, torch.int32, torch.int32)]
        ops.retrieve(*to(device, p, c), *out)
        return out

    def mask(p, c):
        out = junk(n, Q, 1, dtype=torch.int32, device=device)
        ops.ancestor_mask(*to(device, p, c), out)
        return [out]

    compare(device, result(pointers, parents, counts), result(reference.retrieve, parents, counts))
    expected = result(lambda *args: [reference.ancestor_mask(*args)], parents, counts)
    compare(device, result(mask, parents, counts), expected)


@st.composite
def spoilt_pointers(draw):
    """(candidates, next_token, next_sibling, num_nodes) of which any entry may be wrong."""
    tokens, parents, counts = random_trees(draw(st.integers(0, 2**31)), 2, Q - 1)
    _, child, sibling = reference.retrieve(parents, counts)
    for _ in range(draw(st.integers(0, 5))):
        row, slot = draw(st.integers(0, 1)), draw(st.integers(0, Q - 1))
        kind = draw(st.sampled_from(["child", "sibling", "circle", "count", "token"]))
        if kind == "child":
            child[row, slot] = draw(INT32)
        elif kind == "sibling":
            sibling[row, slot] = draw(INT32)
        elif kind == "circle":
            child[row, slot] = sibling[row, slot] = draw(st.integers(0, slot))
        elif kind == "count":
            counts[row] = draw(INT32)
        else:
            tokens[row, slot] = draw(INT64)
    return tokens, child, sibling, counts


@given(spoilt_pointers(), st.data())
def test_walks(device, tree, data):
    need_kernels(device)
    depth = data.draw(st.integers(0, 8))
    drawn = tensor(data.draw, st.one_of(st.integers(0, 4), INT64), (2, Q), torch.int64)

    def walk(*args):
        out = walk_outputs(device, 2, Q, depth)
        ops.walk(*to(device, *args), *out)
        return out

    compare(device, result(walk, *tree, drawn), result(reference.walk, *tree, drawn, depth))


@pytest.mark.parametrize("drawn", [False, True])
@given(spoilt_pointers(), st.data())
def test_walks_with_coins(device, drawn, tree, data):
    need_kernels(device)
    depth, vocab = data.draw(st.integers(0, 8)), 5
    op, rule = (
        (ops.walk_residual, reference.walk_residual) if drawn else (ops.walk_coins, reference.walk_coins)
    )
    probs = tensor(data.draw, st.one_of(st.floats(0, 1, width=32), FLOATS), (2, Q, vocab), torch.float32)
    coins = tensor(data.draw, st.one_of(st.floats(0, 1, width=32), FLOATS), (2, Q), torch.float32)
    final = tensor(data.draw, st.one_of(st.floats(0, 1, width=32), FLOATS), (2,), torch.float32)

    def walk(*args):
        out = walk_outputs(device, 2, Q, depth)
        op(*to(device, *args), *out)
        return out

    scores = [probs, coins, final]
    if drawn:
        values = st.one_of(st.floats(0, 1, width=32), FLOATS)
        scores.insert(1, tensor(data.draw, values, (2, 8, vocab), torch.float32))
    ours = result(walk, *tree, *scores)
    compare(device, ours, result(rule, *tree, *scores, depth))
    if not isinstance(ours, str):
        emitted = ours[0][ours[0] != -1].tolist()
        good = set(range(vocab)) | set(tree[0].flatten().tolist())
        assert set(emitted) <= good, "a token that nobody offered"


@given(st.data())
def test_building(device, data):
    """Scores that are not descending, infinite or no numbers; budgets and tokens of any size; no depths."""
    need_kernels(device)
    depth, ranks = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    logps = tensor(data.draw, FLOATS, (2, depth, ranks), torch.float32)
    ids = tensor(data.draw, INT64, (2, depth, ranks), torch.int64)
    budgets = tensor(data.draw, INT32, (2,), torch.int32)

    def build(*args):
        out = [junk(2, Q, dtype=t, device=device) for t in (torch.int64, torch.int32, torch.int32)]
        out += [junk(2, Q, dtype=torch.float32, device=device), junk(2, dtype=torch.int32, device=device)]
        ops.build(*to(device, *args), *out)
        return out

    ours = result(build, logps, ids, budgets)
    compare(device, ours, result(reference.build, logps, ids, budgets, Q - 1))
    assert not isinstance(ours, str)
    # Whatever came in, what comes out is a tree that the other ops take.
    parents, counts = ours[1].cpu(), ours[4].cpu()
    reference.retrieve(parents, counts)


@given(st.data())
def test_planning_moves(device, data):
    need_kernels(device)
    depth, rows = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 12))
    accept = tensor(data.draw, INT64, (2, depth + 1), torch.int64)
    start = tensor(
        data.draw, st.one_of(SMALL, st.sampled_from([1 << 40, 2**63 - 1, -(2**63)])), (2,), torch.int64
    )
    slots = tensor(data.draw, INT64, (rows,), torch.int64)

    def plan(*args):
        out = [junk(2, depth, dtype=torch.int64, device=device) for _ in range(2)]
        accept, start, slots = to(device, *args)
        ops.plan_moves(accept, start, Q, slots, *out)
        return out

    ours = result(plan, accept, start, slots)
    compare(device, ours, result(reference.plan_moves, accept, start, Q, slots))


@given(st.data())
def test_moving_rows(device, data):
    """Rows outside the cache are refused on a CPU and skipped on a GPU; no byte around the view changes."""
    need_kernels(device)
    src = tensor(data.draw, INT64, (1, 3), torch.int64)
    dst = tensor(data.draw, INT64, (1, 3), torch.int64)
    guarded = torch.arange(4 * 2 * 1 * 3, dtype=torch.float32).reshape(4, 2, 1, 3).to(device)
    view, before = guarded[1:3], guarded.cpu().clone()
    expected = result(reference.move_rows, [view.cpu()], src, dst)
    ours = result(ops.move_rows, [view], ops.make_move_table([view]), *to(device, src, dst))
    after = guarded.cpu()
    same([after[0], after[3]], [before[0], before[3]])
    if device == "cpu":
        assert isinstance(ours, str) == isinstance(expected, str), (ours, expected)
        if ours is None:
            same([view], expected)
        else:
            assert "needs rows below 4" in ours


def good(name, device):
    """Arguments that an op takes, by name; the outputs come last."""
    _, parents, counts = random_trees(1, 2, Q - 1)
    _, child, sibling = reference.retrieve(parents, counts)
    i32, i64 = {"dtype": torch.int32}, {"dtype": torch.int64}
    probs, coins = torch.full((2, Q, 5), 0.2), torch.full((2, Q), 0.5)
    logps, ids = draft(1, 2, 3, 4, 0.0, 0.0)
    view = torch.zeros(4, 2, 1, 3)
    walked = walk_outputs("cpu", 2, Q, 3)
    pair = [torch.zeros(2, Q, **i32), torch.zeros(2, Q, **i32)]
    tree = [torch.zeros(2, Q, **i64), child, sibling, counts]
    moves = [torch.full((2, 3), -1), torch.full((2, 3), -1)]
    arguments = {
        "build": [logps, ids, torch.ones(2, **i32), tree[0], *pair, torch.zeros(2, Q), torch.zeros(2, **i32)],
        "retrieve": [parents, counts, torch.zeros(2, Q, **i64), *pair],
        "ancestor_mask": [parents, counts, torch.zeros(2, Q, 1, **i32)],
        "walk": [*tree, torch.zeros(2, Q, **i64), *walked],
        "walk_coins": [*tree, probs, coins, coins[:, 0].contiguous(), *walked],
        "walk_residual": [*tree, probs, probs[:, :4].clone(), coins, coins[:, 0].contiguous(), *walked],
        "plan_moves": [torch.full((2, 4), -1), torch.zeros(2, **i32), Q, torch.arange(14), *moves],
        "move_rows": [[view], ops.make_move_table([view]), *moves],
    }[name]
    return [move(value, device) for value in arguments]


def move(value, device):
    if isinstance(value, list):
        return to(device, *value)
    return value.to(device) if torch.is_tensor(value) else value


# Of these, the op takes the last size as it comes: depth limit, vocabulary, rows of the step.
FREE_SIZES = {("walk", 6), ("walk_coins", 4), ("walk_coins", 8), ("walk_residual", 9), ("plan_moves", 3)}


def spoil(kind, value):
    """A tensor that differs from what was asked for in one way; None where the way makes no difference."""
    if kind == "dtype":
        return value.to(torch.int16)
    if kind == "shape":
        return torch.cat((value, value[..., :1]), dim=-1) if value.dim() and value.shape[-1] else None
    if kind == "rank":
        return value[None]
    if kind == "strides":
        return torch.stack((value, value), dim=-1)[..., 0] if value.numel() > 1 else None
    return value.cpu() if value.is_cuda else None


@pytest.mark.parametrize("kind", ["dtype", "shape", "rank", "strides", "device"])
@pytest.mark.parametrize("name", ops.OPS)
def test_a_wrong_tensor_is_named(device, name, kind):
    """Every tensor of every op, one at a time; the others are good, so the text must be about it."""
    need_kernels(device)
    getattr(ops, name)(*good(name, device))
    tried = 0
    for position, value in enumerate(good(name, device)):
        if not torch.is_tensor(value):
            continue
        wrong = spoil(kind, value)
        if wrong is None:
            continue
        # A wider first tensor only asks for wider outputs, which are then the ones refused.
        arguments = good(name, device)
        arguments[position] = wrong
        if kind == "shape" and (name, position) in FREE_SIZES:
            continue
        tried += 1
        with pytest.raises(RuntimeError, match=r"ddtree::.* needs"):
            getattr(ops, name)(*arguments)
    assert tried or kind == "device"


def test_no_view_and_flat_views_are_refused(device):
    need_kernels(device)
    view, table, src, dst = (good("move_rows", device)[i] for i in range(4))
    with pytest.raises(ValueError, match="at least one view"):
        ops.make_move_table([])
    with pytest.raises(ValueError, match="4-D views"):
        ops.make_move_table([view[0][0]])
    with pytest.raises(RuntimeError, match="at least one view"):
        ops.move_rows([], table, src, dst)
