"""The walks as functions: kernels against the reference and a naive walk, limits, bad pointers, edge
draws."""

from __future__ import annotations

import pytest
import torch
from core_trees import children_of, need_kernels, random_trees, run_retrieve, same, to, walk_outputs
from hypothesis import given
from hypothesis import strategies as st

from vllm_ddtree import ops, reference

VOCAB = 7


def run_walk(device, tokens, child, sibling, counts, drawn, depth):
    out = walk_outputs(device, *tokens.shape, depth)
    ops.walk(*to(device, tokens, child, sibling, counts, drawn), *out)
    return out


def run_coins(device, tokens, child, sibling, counts, probs, coins, finals, depth):
    out = walk_outputs(device, *tokens.shape, depth)
    ops.walk_coins(*to(device, tokens, child, sibling, counts, probs, coins, finals), *out)
    return out


def run_residual(device, tokens, child, sibling, counts, probs, drawn_from, coins, finals, depth):
    out = walk_outputs(device, *tokens.shape, depth)
    ops.walk_residual(*to(device, tokens, child, sibling, counts, probs, drawn_from, coins, finals), *out)
    return out


def case(seed, n, nodes):
    tokens, parents, counts = random_trees(seed, n, nodes)
    _, child, sibling = reference.retrieve(parents, counts)
    rng = torch.Generator().manual_seed(seed + 1)
    drawn = torch.randint(0, 5, tokens.shape, generator=rng)
    probs = torch.rand(n, nodes + 1, VOCAB, generator=rng)
    probs *= torch.rand(probs.shape, generator=rng) < 0.6  # tokens and whole rows of zero probability
    probs /= probs.sum(-1, keepdim=True).clamp_min(1e-9)
    coins = torch.rand(n, nodes + 1, generator=rng)
    coins[torch.rand(coins.shape, generator=rng) < 0.2] = 0.0
    coins[torch.rand(coins.shape, generator=rng) < 0.2] = 1 - 2.0**-24
    finals = torch.rand(n, generator=rng)
    finals[::2] = torch.tensor([0.0, 1 - 2.0**-24])[torch.randint(0, 2, finals[::2].shape, generator=rng)]
    return tokens, parents, counts, child, sibling, drawn, probs, coins, finals


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(0, 40), st.integers(0, 6))
def test_kernels_are_the_reference(device, seed, n, nodes, depth):
    need_kernels(device)
    tokens, _, counts, child, sibling, drawn, probs, coins, finals = case(seed, n, nodes)
    tree = (tokens, child, sibling, counts)
    same(run_walk(device, *tree, drawn, depth), reference.walk(*tree, drawn, depth))
    same(
        run_coins(device, *tree, probs, coins, finals, depth),
        reference.walk_coins(*tree, probs, coins, finals, depth),
    )


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(0, 40), st.integers(0, 6))
def test_the_residual_walk_is_the_reference(device, seed, n, nodes, depth):
    """Children that repeat, that the drafter or the target rules out, infinite and extreme coins."""
    need_kernels(device)
    tokens, _, counts, child, sibling, _, probs, coins, finals = case(seed, n, nodes)
    rng = torch.Generator().manual_seed(seed + 2)
    drawn_from = torch.rand(n, depth + 1, VOCAB, generator=rng)
    drawn_from *= torch.rand(drawn_from.shape, generator=rng) < 0.8
    drawn_from /= drawn_from.sum(-1, keepdim=True).clamp_min(1e-9)
    coins[torch.rand(coins.shape, generator=rng) < 0.1] = torch.inf
    args = (tokens, child, sibling, counts, probs, drawn_from, coins, finals, depth)
    same(run_residual(device, *args), reference.walk_residual(*args))


def test_the_residual_walk_over_a_real_vocabulary(device):
    """Children really drawn, 50,001 tokens: what is left after many rejections, and its last draw."""
    need_kernels(device)
    n, nodes, vocab = 3, 12, 50_001
    rng = torch.Generator().manual_seed(0)
    parents = torch.tensor([[-1, *[0] * 6, *[1] * 6]] * n, dtype=torch.int32)
    counts = torch.full((n,), nodes, dtype=torch.int32)
    _, child, sibling = reference.retrieve(parents, counts)
    probs = torch.randn(n, nodes + 1, vocab, generator=rng).mul(3).softmax(-1)
    drawn_from = torch.randn(n, 2, vocab, generator=rng).mul(3).softmax(-1)
    tokens = torch.zeros(n, nodes + 1, dtype=torch.int64)
    for depth, first in enumerate((1, 7)):
        tokens[:, first : first + 6] = torch.multinomial(drawn_from[:, depth], 6, generator=rng)
    lengths = set()
    for coin in (0.0, 0.3, 0.9, 1 - 2.0**-24):
        for final in (0.0, 0.5, 1 - 2.0**-24):
            coins, finals = torch.full((n, nodes + 1), coin), torch.full((n,), final)
            args = (tokens, child, sibling, counts, probs, drawn_from, coins, finals, 2)
            result = run_residual(device, *args)
            same(result, reference.walk_residual(*args))
            lengths |= set(result[2].tolist())
    assert len(lengths) > 1, lengths


def test_a_certain_target_is_followed_whatever_was_drawn(device):
    """Temperature 0: the likeliest token is accepted with any coin below 1 and drawn if no child has it."""
    tokens = torch.tensor([[0, 2, 1, 3]])
    parents = torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32)
    counts = torch.tensor([3], dtype=torch.int32)
    _, child, sibling = run_retrieve("cpu", parents, counts)
    rng = torch.Generator().manual_seed(0)
    drawn_from = torch.rand(1, 1, VOCAB, generator=rng).softmax(-1)
    coins = torch.full((1, 4), 1 - 2.0**-24)
    for token, node in ((1, 2), (3, 3), (2, 1), (5, None)):
        probs = torch.zeros(1, 4, VOCAB)
        probs[..., token] = 1.0
        args = (tokens, child, sibling, counts, probs, drawn_from, coins, torch.tensor([0.5]))
        predict, accepted, _ = run_residual(device, *args, 1)
        assert int(predict[0]) == token
        assert accepted.tolist() == [[0, -1 if node is None else node]]


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 30), st.integers(0, 6))
def test_walk_follows_the_target(device, seed, n, nodes, depth):
    tokens, parents, counts, child, sibling, drawn, *_ = case(seed, n, nodes)
    predict, accepted, lengths = run_walk(device, tokens, child, sibling, counts, drawn, depth)
    predict = predict.view(n, -1).cpu()
    for r in range(n):
        path = [0]
        while len(path) <= depth:
            token = int(drawn[r, path[-1]])
            family = children_of(parents[r], int(counts[r]), path[-1])
            match = [i for i in family if int(tokens[r, i]) == token]
            if not match:
                break
            path.append(match[0])
        assert int(lengths[r]) == len(path) - 1
        flat = [r * (nodes + 1) + i for i in path]
        assert accepted[r].tolist() == flat + [-1] * (depth + 1 - len(path))
        emitted = {i: int(drawn[r, i]) for i in path}
        assert predict[r].tolist() == [emitted.get(i, -1) for i in range(nodes + 1)]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 50_001])
def test_residual_draw_over_real_vocabularies(device, vocab):
    need_kernels(device)
    n, nodes = 4, 12
    rng = torch.Generator().manual_seed(vocab)
    parents = torch.tensor([[-1] + [0] * nodes] * n, dtype=torch.int32)
    counts = torch.tensor([0, 3, 12, 12], dtype=torch.int32)
    _, child, sibling = reference.retrieve(parents, counts)
    tokens = torch.randint(0, vocab, (n, nodes + 1), generator=rng)
    probs = torch.randn(n, nodes + 1, vocab, generator=rng).mul(4).softmax(-1)
    probs[probs < probs.median(-1, keepdim=True).values] = 0
    coins = torch.full((n, nodes + 1), 1 - 2.0**-24)
    for final in (0.0, 0.25, 0.5, 0.99, 1 - 2.0**-24):
        args = (tokens, child, sibling, counts, probs, coins, torch.full((n,), final))
        same(run_coins(device, *args, 3), reference.walk_coins(*args, 3))


def test_a_rejected_support_falls_back_inside_it(device):
    """Children cover the support, rounding rejects them all: the bonus is the likeliest token, not the last
    id."""
    tokens = torch.tensor([[0, 2, 1]])
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    counts = torch.tensor([2], dtype=torch.int32)
    _, child, sibling = run_retrieve("cpu", parents, counts)
    probs = torch.zeros(1, 3, VOCAB)
    probs[..., 2], probs[..., 1] = 0.6, 0.4 * (1 - 2.0**-20)
    coins = torch.full((1, 3), 1 - 2.0**-24)
    predict, accepted, length = run_coins(
        device, tokens, child, sibling, counts, probs, coins, torch.tensor([0.5]), 1
    )
    assert predict.tolist() == [2, -1, -1]
    assert accepted.tolist() == [[0, -1]] and length.tolist() == [0]


def test_bad_pointers(device):
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    child = torch.tensor([[1, 0, 99, -1]], dtype=torch.int32)  # 1 -> 0 would walk in a circle
    sibling = torch.full((1, 4), -1, dtype=torch.int32)
    counts = torch.tensor([3], dtype=torch.int32)
    args = (tokens, child, sibling, counts, torch.zeros(1, 4, dtype=torch.int64))
    if device == "cpu" or not ops.has_kernels(device):
        with pytest.raises((RuntimeError, ValueError), match="pointer"):
            run_walk(device, *args, 3)
    else:
        assert run_walk(device, *args, 3)[2].tolist() == [1]


def test_reference_refuses_bad_pointers():
    args = [torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 1]]), torch.tensor([[-1, -1]])]
    with pytest.raises(ValueError, match="pointers only lead forward"):
        reference.walk(*args, torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int64), 3)
