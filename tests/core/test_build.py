"""The best-first builder: kernels against the reference, the reference against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from core_trees import batches, draft, need_kernels, run_build, same
from hypothesis import given

from vllm_ddtree import ops, reference


@given(batches())
def test_kernel_is_the_reference(device, batch):
    need_kernels(device)
    same(run_build(device, *batch), reference.build(*batch))


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 64, 127, 128, 200])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_kernel_is_the_reference_at_register_boundaries(device, nodes, step):
    need_kernels(device)
    logps, ids = draft(nodes, 3, 7, 64, step, 0.1)
    budgets = torch.tensor([nodes, nodes // 2, nodes - 1], dtype=torch.int32)
    same(run_build(device, logps, ids, budgets, nodes), reference.build(logps, ids, budgets, nodes))


@pytest.mark.parametrize(("nodes", "depth", "ranks"), [(256, 15, 256), (512, 15, 512), (1024, 31, 1000)])
@pytest.mark.parametrize("step", [0.0, 0.25, 1e9])
def test_large_trees_agree_between_kernels_and_reference(device, nodes, depth, ranks, step):
    need_kernels(device)
    logps, ids = draft(nodes, 2, depth, ranks, step, 0.0)
    logps = logps / 50  # many ranks stay competitive, so that trees are wide; step 1e9 makes every score 0
    budgets = torch.tensor([nodes, nodes - 7], dtype=torch.int32)
    same(run_build(device, logps, ids, budgets, nodes), reference.build(logps, ids, budgets, nodes))


def brute_force(logps, budget):
    """Every path of the product with its float32 score, best first, ties by rank tuple."""
    paths = []
    for length in range(1, len(logps) + 1):
        for ranks in itertools.product(range(len(logps[0])), repeat=length):
            score = torch.tensor(0.0)
            for d, k in enumerate(ranks):
                score = score + logps[d][k]
            if score > -math.inf:
                paths.append((-float(score), ranks))
    return sorted(paths)[: max(budget, 0)]


@pytest.mark.parametrize("step", [0.0, 0.5, 3.0, 1e9])
@pytest.mark.parametrize("seed", range(6))
def test_tree_is_the_top_of_the_product(device, step, seed):
    logps, ids = draft(seed, 2, 4, 3, step, 0.3)
    nodes = [5, 17, 40][seed % 3]
    budgets = torch.tensor([nodes, nodes // 2], dtype=torch.int32)
    tokens, parents, depths, scores, counts = (t.cpu() for t in run_build(device, logps, ids, budgets, nodes))
    for r in range(2):
        # An absent entry ends its row, so what follows it is absent as well.
        clean = [[v if v == v else -math.inf for v in row] for row in logps[r].tolist()]
        best = brute_force(torch.tensor(clean), int(budgets[r]))
        assert int(counts[r]) == len(best)
        index = {(): 0} | {ranks: i for i, (_, ranks) in enumerate(best, start=1)}
        for i, (negated, ranks) in enumerate(best, start=1):
            assert float(scores[r, i]) == -negated
            assert int(depths[r, i]) == len(ranks)
            assert int(parents[r, i]) == index[ranks[:-1]]
            assert int(tokens[r, i]) == int(ids[r, len(ranks) - 1, ranks[-1]])


@given(batches(max_nodes=24))
def test_every_prefix_is_the_smaller_tree(device, batch):
    logps, ids, _, nodes = batch
    n = logps.shape[0]
    full = run_build(device, logps, ids, torch.full((n,), nodes, dtype=torch.int32), nodes)
    for budget in {0, 1, nodes // 2}:
        cut = run_build(device, logps, ids, torch.full((n,), budget, dtype=torch.int32), nodes)
        for whole, part in zip(full[:4], cut[:4], strict=True):
            for r in range(n):
                real = int(cut[4][r]) + 1
                assert real - 1 == min(budget, int(full[4][r]))
                assert torch.equal(whole[r, :real], part[r, :real])


@given(batches())
def test_padding_and_pop_order(device, batch):
    tokens, parents, depths, scores, counts = (t.cpu() for t in run_build(device, *batch))
    budgets, nodes = batch[2], batch[3]
    for r, count in enumerate(counts.tolist()):
        assert count <= min(max(int(budgets[r]), 0), nodes)
        assert (int(tokens[r, 0]), int(parents[r, 0]), int(depths[r, 0]), float(scores[r, 0])) == (
            0,
            -1,
            0,
            0.0,
        )
        live = scores[r, 1 : count + 1]
        assert bool((live[1:] <= live[:-1]).all()) and bool((live > -math.inf).all())
        for i in range(1, count + 1):
            assert 0 <= int(parents[r, i]) < i
            assert int(depths[r, i]) == int(depths[r, int(parents[r, i])]) + 1
        assert bool((tokens[r, count + 1 :] == 0).all()) and bool((parents[r, count + 1 :] == -1).all())
        assert bool((depths[r, count + 1 :] == 0).all()) and bool((scores[r, count + 1 :] == -math.inf).all())
        pairs = list(zip(parents[r, 1 : count + 1].tolist(), tokens[r, 1 : count + 1].tolist(), strict=True))
        assert len(set(pairs)) == count, "siblings have distinct tokens"


def test_nothing_to_draft(device):
    logps = torch.full((2, 3, 4), -math.inf)
    ids = torch.zeros(2, 3, 4, dtype=torch.int64)
    budgets = torch.tensor([5, 5], dtype=torch.int32)
    assert run_build(device, logps, ids, budgets, 5)[4].tolist() == [0, 0]
    assert run_build(device, logps.fill_(math.nan), ids, budgets, 5)[4].tolist() == [0, 0]
    empty = run_build(device, logps[:, :0].contiguous(), ids[:, :0].contiguous(), budgets, 5)
    assert empty[4].tolist() == [0, 0]


def test_expected_accepted_and_max_depth():
    logws = torch.tensor([[0.0, math.log(0.5), math.log(0.25)], [0.0, -math.inf, -math.inf]])
    torch.testing.assert_close(reference.expected_accepted(logws), torch.tensor([0.75, 0.0]))
    depths = torch.tensor([[0, 1, 2], [0, 0, 0]], dtype=torch.int32)
    assert reference.max_depth(depths).tolist() == [2, 0]


def test_wrong_buffers_are_refused(device):
    need_kernels(device)
    logps, ids, budgets = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64), torch.ones(1).int()
    out = run_build(device, logps, ids, budgets, 3)
    logps, ids, budgets = logps.to(device), ids.to(device), budgets.to(device)
    with pytest.raises(RuntimeError, match=r"`parents` as a contiguous Int tensor of shape \[1, 4\]"):
        ops.build(logps, ids, budgets, out[0], out[1].long(), *out[2:])
    with pytest.raises(RuntimeError, match="not contiguous"):
        ops.build(logps.expand(1, 2, 2).transpose(1, 2), ids, budgets, *out)
