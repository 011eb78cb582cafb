"""The step's bookkeeping against plain Python: composed from ops on the CPU, one kernel each on the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from core_trees import draft, random_trees, same, to
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ddtree import reference, step
from vllm_ddtree.engine.state import TreeStore

SEEDS = st.integers(0, 2**31)


def filled_store(seed: int, states: int, nodes: int, device: str) -> TreeStore:
    """A store of random trees, one for each state."""
    tokens, parents, count = random_trees(seed, states + 1, nodes)
    store = TreeStore(states, nodes, torch.device(device))
    depths = torch.zeros_like(parents)
    for i in range(1, nodes + 1):
        depths[:, i] = depths.gather(1, parents[:, i : i + 1].clamp(min=0).long())[:, 0] + 1
    _, next_token, next_sibling = reference.retrieve(parents, count)
    mask = reference.ancestor_mask(parents, count)
    for name, value in (
        ("tokens", tokens), ("parents", parents), ("depths", depths), ("num_nodes", count),
        ("next_token", next_token), ("next_sibling", next_sibling), ("mask", mask),
    ):  # fmt: skip
        getattr(store, name).copy_(value)
    return store


def ragged(seed: int, nodes: int, states: int) -> dict:
    """A batch: verified requests of full and cut width, prompts with one row of logits, in any order."""
    rng = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, states + 1, (), generator=rng))
    kind = torch.randint(0, 3, (n,), generator=rng)
    cut = torch.randint(0, nodes + 1, (n,), generator=rng) + 1
    prompt = torch.randint(1, 2 * nodes + 4, (n,), generator=rng)
    logits = torch.where(kind == 0, nodes + 1, torch.where(kind == 1, cut, 1))
    length = torch.where(kind == 2, prompt, logits)
    as_starts = lambda sizes: torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int()  # noqa: E731
    return {
        "n": n,
        "states": torch.randperm(states, generator=rng)[:n].int(),
        "query_start": as_starts(length),
        "cu_logits": as_starts(logits),
        "computed": torch.randint(0, 900, (states,), generator=rng).int(),
        "rng": rng,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab", "k"), [(8, 1), (64, 64), (1000, 7), (4096, 64), (8192, 512), (49152, 33), (16, 5), (1003, 9)]
)
def test_top_logps(device, dtype, vocab, k):
    rng = torch.Generator().manual_seed(vocab + k)
    logits = (torch.randn(3, vocab, generator=rng) * 4).to(dtype)
    logits[1, vocab // 2 :] = -math.inf
    logits[2] = logits[2].round()  # many equal values
    if vocab == 8192:
        logits[2] = torch.where(torch.arange(vocab) % 3 == 0, 1.0, -1.0).to(dtype)  # more equals than fit
    wide = logits.float()
    value, token = wide.sort(dim=-1, descending=True, stable=True)
    logps, tokens = step.top_logps(logits.to(device), k)
    real = value[:, :k] > -math.inf
    assert torch.equal(tokens.cpu()[real], token[:, :k][real])
    expected = value[:, :k] - wide.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logps.cpu(), expected, rtol=0, atol=2e-5)


def test_top_logps_of_a_row_with_nan_are_absent(device):
    logits = torch.randn(2, 256)
    logits[0, 17] = math.nan
    logps, _ = step.top_logps(logits.to(device), 8)
    assert not (logps[0] > -math.inf).any()
    assert (logps[1] > -math.inf).all()


@settings(max_examples=25)
@given(seed=SEEDS, nodes=st.sampled_from([1, 7, 33, 64, 100]))
def test_build_trees(device, seed, nodes):
    rng = torch.Generator().manual_seed(seed)
    n, states = 3, 6
    logps, ids = draft(seed, n, 4, min(nodes, 9), 0.5, 0.3)
    store = TreeStore(states, nodes, torch.device(device))
    rows = torch.randperm(states, generator=rng)[:n].repeat_interleave(4)
    rows[-4:] = -1 if seed % 2 else rows[-4:]
    strided = rows.to(device)[::4]
    store.is_chain[rows[0]] = True
    budgets = torch.tensor([nodes, nodes // 2, nodes], dtype=torch.int32)
    drafts = torch.full((n, nodes), -7, device=device)
    step.build_trees(*to(device, logps, ids, budgets), strided, store, drafts)

    logps[0, :, 1:] = -math.inf
    tokens, parents, depths, logws, count = reference.build(logps, ids, budgets, nodes)
    _, next_token, next_sibling = reference.retrieve(parents, count)
    mask = reference.ancestor_mask(parents, count)
    same([drafts.cpu()], [tokens[:, 1:]])
    for r in range(n):
        row = int(rows[4 * r])
        if row < 0:
            continue
        have = (
            store.tokens, store.parents, store.depths, store.node_logws, store.num_nodes, store.next_token,
            store.next_sibling, store.mask,
        )  # fmt: skip
        want = (tokens, parents, depths, logws, count, next_token, next_sibling, mask)
        same([t[row].cpu() for t in have], [t[r] for t in want])
    untouched = set(range(states)) - set(rows.tolist())
    assert all(int(store.num_nodes[row]) == 0 for row in untouched)


@settings(max_examples=25)
@given(seed=SEEDS, nodes=st.sampled_from([1, 7, 33, 64]))
def test_begin_step(device, seed, nodes):
    states = 5
    store = filled_store(seed, states, nodes, device)
    batch = ragged(seed, nodes, states)
    n, start, cu = batch["n"], batch["query_start"].tolist(), batch["cu_logits"].tolist()
    positions = torch.arange(start[-1] + 3)
    local = torch.full((cu[-1],), 5, dtype=torch.int32)
    step_mask = torch.full((states, *store.mask.shape[1:]), 9, dtype=torch.int32)
    tree_len = torch.full((states,), 9, dtype=torch.int32)
    want = [t.clone() for t in (positions, local, step_mask[:n], tree_len)]
    depths, mask = store.depths.cpu(), store.mask.cpu()
    for r, state in enumerate(batch["states"].tolist()):
        rows = cu[r + 1] - cu[r]
        want[1][cu[r] : cu[r + 1]] = depths[state, :rows]
        want[2][r] = mask[state]
        if rows > 1:
            want[0][start[r] : start[r + 1]] = int(batch["computed"][state]) + depths[state, :rows].long()
    want[3][:] = 0
    want[3][:n] = torch.where(batch["cu_logits"].diff() > 1, batch["cu_logits"].diff(), 0)

    moved = to(device, *(batch[key] for key in ("states", "query_start", "cu_logits", "computed")))
    out = to(device, positions, local, step_mask, tree_len)
    step.begin_step(*moved, store, *out)
    same([t.cpu() for t in (*out[:2], out[2][:n], out[3])], want)


@settings(max_examples=25)
@given(seed=SEEDS, nodes=st.sampled_from([1, 7, 33, 64]), max_depth=st.sampled_from([1, 3, 15]))
def test_walk_rows(device, seed, nodes, max_depth):
    states = 5
    store = filled_store(seed, states, nodes, device)
    batch = ragged(seed, nodes, states)
    n, cu = batch["n"], batch["cu_logits"].tolist()
    drawn = torch.randint(0, 3, (cu[-1],), generator=batch["rng"])
    drafts = torch.randint(-1, 3, (cu[-1],), generator=batch["rng"]).int()
    width = nodes + 1
    sampled = torch.full((n, max_depth + 1), -1)
    index, count = sampled.clone(), torch.zeros(n, dtype=torch.int32)
    for r, state in enumerate(batch["states"].tolist()):
        real = min(int(store.num_nodes[state]), cu[r + 1] - cu[r] - 1)
        parent = store.parents[state].tolist()
        node, depth = 0, 0
        while True:
            token = int(drawn[cu[r] + node])
            sampled[r, depth], index[r, depth] = token, r * width + node
            depth += 1
            children = [i for i in range(1, real + 1) if parent[i] == node]
            match = [i for i in children if int(drafts[cu[r] + i]) == token]
            if depth > max_depth or not match:
                break
            node = match[0]
        count[r] = depth
    got = step.walk_rows(*to(device, drawn, drafts, batch["cu_logits"], batch["states"]), store, max_depth)
    same([t.cpu() for t in got], [sampled, index, count])


def paths(batch: dict, nodes: int, max_depth: int) -> torch.Tensor:
    """Ascending nodes within each request's rows, root first, -1 after."""
    index = torch.full((batch["n"], max_depth + 1), -1)
    for r, rows in enumerate(batch["cu_logits"].diff().tolist()):
        depth = int(torch.randint(0, min(max_depth, rows - 1) + 1, (), generator=batch["rng"]))
        chosen = torch.randperm(rows - 1, generator=batch["rng"])[:depth].sort().values + 1
        index[r, 0] = r * (nodes + 1)
        index[r, 1 : depth + 1] = r * (nodes + 1) + chosen
    return index


@settings(max_examples=25)
@given(seed=SEEDS, nodes=st.sampled_from([1, 7, 33, 64]), max_depth=st.sampled_from([1, 3, 15]))
def test_commit(device, seed, nodes, max_depth):
    states = 5
    batch = ragged(seed, nodes, states)
    index = paths(batch, nodes, max_depth)
    start = batch["query_start"].tolist()
    rows = start[-1]
    slots = torch.randperm(16 * (rows // 16 + 2), generator=batch["rng"])[:rows]
    caches = [torch.randn(rows // 16 + 2, 16, 2, 8, generator=batch["rng"]) for _ in range(2)]
    hidden = [torch.randn(rows, 12, generator=batch["rng"]) for _ in range(3)]
    positions = torch.full((rows,), -5)
    want_caches, want_hidden = [c.clone() for c in caches], [h.clone() for h in hidden]
    want_positions = positions.clone()
    for r, state in enumerate(batch["states"].tolist()):
        want_positions[start[r] : start[r + 1]] = int(batch["computed"][state]) + torch.arange(
            start[r + 1] - start[r]
        )
        for d, flat in enumerate(index[r].tolist()):
            if flat < 0:
                break
            source, target = start[r] + flat % (nodes + 1), start[r] + d
            for old, new in zip(hidden, want_hidden, strict=True):
                new[target] = old[source]
            a, b = int(slots[source]), int(slots[target])
            for old, new in zip(caches, want_caches, strict=True):
                new[b // 16, b % 16] = old[a // 16, a % 16]

    caches, hidden = to(device, *caches), to(device, *hidden)
    positions, index, slots = to(device, positions, index, slots)
    query_start, order, computed = to(device, batch["query_start"], batch["states"], batch["computed"])
    step.CacheMover(caches).move(index, query_start, nodes + 1, slots)
    step.commit_rows(hidden, positions, index, query_start, order, computed, nodes + 1)
    same([t.cpu() for t in (*caches, *hidden, positions)], [*want_caches, *want_hidden, want_positions])
