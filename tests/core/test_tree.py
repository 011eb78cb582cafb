"""Pointers and masks: the two derived forms of a tree, against naive definitions."""

from __future__ import annotations

import pytest
import torch
from core_trees import (
    batches,
    children_of,
    junk,
    need_kernels,
    random_trees,
    run_build,
    run_retrieve,
    same,
    to,
)
from hypothesis import given
from hypothesis import strategies as st

from vllm_ddtree import ops, reference


def run_mask(device, parents, num_nodes):
    n, q = parents.shape
    mask = junk(n, q, (q + 31) // 32, dtype=torch.int32, device=device)
    ops.ancestor_mask(*to(device, parents, num_nodes), mask)
    return mask


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 70))
def test_kernels_are_the_reference(device, seed, n, nodes):
    need_kernels(device)
    _, parents, counts = random_trees(seed, n, nodes)
    same(run_retrieve(device, parents, counts), reference.retrieve(parents, counts))
    same([run_mask(device, parents, counts)], [reference.ancestor_mask(parents, counts)])


@pytest.mark.parametrize("nodes", [255, 256, 600, 1024])
def test_wide_trees(device, nodes):
    need_kernels(device)
    _, parents, counts = random_trees(nodes, 2, nodes)
    parents[0, 1:] = torch.where(torch.arange(1, nodes + 1) % 3 > 0, 0, parents[0, 1:])
    same(run_retrieve(device, parents, counts), reference.retrieve(parents, counts))
    same([run_mask(device, parents, counts)], [reference.ancestor_mask(parents, counts)])


@given(batches())
def test_two_pointers_visit_every_real_node_once(device, batch):
    _, parents, _, scores, counts = run_build(device, *batch)
    index, child, sibling = (t.cpu() for t in run_retrieve(device, parents, counts))
    n, q = parents.shape
    assert index.flatten().tolist() == list(range(n * q))
    for r, count in enumerate(counts.tolist()):
        visited, stack = [], [0]
        while stack:
            node = stack.pop()
            visited.append(node)
            assert len(visited) <= q, "the pointers form a cycle"
            family = []
            at = int(child[r, node])
            while at != -1:
                family.append(at)
                at = int(sibling[r, at])
            assert family == children_of(parents[r], count, node)
            weights = [float(scores[r, i]) for i in family]
            assert weights == sorted(weights, reverse=True), "siblings descend in node_logws"
            stack.extend(family)
        assert sorted(visited) == list(range(count + 1))
        assert child[r, count + 1 :].eq(-1).all() and sibling[r, count + 1 :].eq(-1).all()


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(0, 70))
def test_mask_is_the_set_of_ancestors(device, seed, n, nodes):
    _, parents, counts = random_trees(seed, n, nodes)
    mask = run_mask(device, parents, counts).cpu().tolist()
    for r, count in enumerate(counts.tolist()):
        for i in range(nodes + 1):
            seen = {j for j in range(nodes + 1) if mask[r][i][j // 32] >> (j % 32) & 1}
            expected, node = {i}, int(parents[r, i])
            while i <= count and node >= 0:
                expected.add(node)
                node = int(parents[r, node])
            assert seen == expected


@pytest.mark.parametrize("parent", [2, 3, -1, 99])
def test_cpu_refuses_a_parent_that_is_not_earlier(parent):
    parents = torch.tensor([[-1, 0, parent, 0]], dtype=torch.int32)
    counts = torch.tensor([3], dtype=torch.int32)
    with pytest.raises((RuntimeError, ValueError), match=r"parents\[0, 2\].* in \[0, 2\)"):
        run_retrieve("cpu", parents, counts)
    with pytest.raises((RuntimeError, ValueError), match=r"parents\[0, 2\].* in \[0, 2\)"):
        run_mask("cpu", parents, counts)


def test_cpu_refuses_more_nodes_than_slots():
    parents = torch.tensor([[-1, 0]], dtype=torch.int32)
    with pytest.raises((RuntimeError, ValueError), match=r"num_nodes\[0\].* in \[0, 1\]"):
        run_retrieve("cpu", parents, torch.tensor([2], dtype=torch.int32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="how CUDA kernels treat bad input needs a GPU")
def test_cuda_ignores_bad_nodes():
    need_kernels("cuda")
    parents = torch.tensor([[-1, 0, 99, 3, -7, 0]], dtype=torch.int32)  # nodes 2, 3 and 4 are unusable
    counts = torch.tensor([50], dtype=torch.int32)
    _, child, sibling = run_retrieve("cuda", parents, counts)
    assert child.tolist() == [[1, -1, -1, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 5, -1, -1, -1, -1]]
    assert run_mask("cuda", parents, counts).flatten().tolist() == [1, 3, 4, 8, 16, 33]
