"""Both derivers over random small trees: 200,000 walks each against the exact distribution.

Ragged trees, equal probabilities, zeros, masses near one. Thresholds as in test_walk_statistics: 5 standard
deviations per check, a false-alarm rate below 1e-6 each, seeds fixed. That a mistake would be seen is shown
there, with each of the four known ones put in.
"""

from __future__ import annotations

import pytest
import torch
from core_trees import to, walk_outputs
from test_step import filled_store
from test_walk_statistics import Scenario, emitted_rows, judge, path_sum

from vllm_ddtree import coins, ops, reference, step
from vllm_ddtree.engine.state import TreeStore

SCENARIOS, WALKS = 10, 20_000  # 200,000 walks of each rule
DEPTH = 5


def random_scenario(seed: int) -> Scenario:
    rng = torch.Generator().manual_seed(seed)
    vocab = int(torch.randint(2, 7, (), generator=rng))
    nodes = int(torch.randint(1, 13, (), generator=rng))
    parents, tokens, depth = [-1], [0], [0]
    for i in range(1, nodes + 1):
        parent = int(torch.randint(0, i, (), generator=rng))
        parents.append(parent if depth[parent] < DEPTH else 0)
        depth.append(depth[parents[-1]] + 1)
        tokens.append(int(torch.randint(0, vocab, (), generator=rng)))
    probs = (torch.randn(nodes + 1, vocab, generator=rng) * 2).softmax(-1)
    kind = torch.randint(0, 4, (nodes + 1,), generator=rng)
    probs[kind == 0] = probs[kind == 0].mul(4).round().clamp(min=1)  # equal probabilities
    probs[kind == 1, 0] = 0.0  # ruled out
    probs[kind == 2, -1] += 200.0  # nearly certain
    return Scenario(tokens, parents, probs / probs.sum(-1, keepdim=True))


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_draws(device, seed):
    scenario = random_scenario(seed)
    rng = torch.Generator().manual_seed(100 + seed)
    drawn = torch.multinomial(scenario.probs, WALKS, replacement=True, generator=rng).T.contiguous()
    tokens, child, sibling, counts = scenario.tensors(WALKS)
    out = walk_outputs(device, *tokens.shape, DEPTH)
    ops.walk(*to(device, tokens, child, sibling, counts, drawn), *out)
    judge(scenario, emitted_rows(*out))


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_keyed_coins(device, seed):
    """Coins as the engine makes them: a hash of (seed, position, token)."""
    scenario = random_scenario(seed)
    tokens, child, sibling, counts = scenario.tensors(WALKS)
    depth = torch.zeros(len(scenario.parents), dtype=torch.int64)
    for i, parent in enumerate(scenario.parents[1:], start=1):
        depth[i] = depth[parent] + 1
    requests = torch.arange(WALKS)[:, None]  # consecutive seeds, as users choose them
    flips = coins.keyed_uniform(requests, 500 + depth, tokens)
    finals = coins.keyed_uniform(requests, torch.tensor([[500]]), -1)[:, 0].contiguous()
    probs = scenario.probs.expand(WALKS, -1, -1).contiguous()
    out = walk_outputs(device, *tokens.shape, DEPTH)
    ops.walk_coins(*to(device, tokens, child, sibling, counts, probs, flips, finals), *out)
    judge(scenario, emitted_rows(*out))


def test_coins_of_neighbouring_keys_are_independent():
    """Pairs of coins over seeds, positions or tokens fill the unit square evenly."""
    base = torch.arange(100_000)
    zero = torch.zeros_like(base)
    for keys in ((base, zero, zero), (zero, base, zero), (zero, zero, base)):
        flips = coins.keyed_uniform(*keys)
        assert float(flips.min()) >= 0 and float(flips.max()) < 1
        cell = (flips[:-1] * 8).long() * 8 + (flips[1:] * 8).long()
        counts = torch.bincount(cell, minlength=64).double()
        expected = (len(base) - 1) / 64
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < 63 + 5 * (2 * 63) ** 0.5, statistic


def test_mean_accepted_over_scenarios_is_the_path_sum():
    for seed in range(SCENARIOS):
        scenario = random_scenario(seed)
        mean = sum(p * (len(o) - 1) for o, p in scenario.outcomes().items())
        assert mean == pytest.approx(path_sum(scenario), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_coins_over_certain_rows_are_the_draws(device, seed):
    """Where the target is certain both rules take the same path: cut trees and ruled-out drafts included."""
    nodes, states = 20, 4
    store: TreeStore = filled_store(seed, states, nodes, device)
    rng = torch.Generator().manual_seed(seed)
    widths = torch.tensor([nodes + 1, 7, 1])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)]).int()
    rows = int(cu[-1])
    order = torch.randperm(states, generator=rng)[:3].int()
    drawn = torch.randint(0, 3, (rows,), generator=rng)
    drafts = torch.randint(-1, 3, (rows,), generator=rng).int()
    positions, seeds = torch.randint(0, 99, (rows,), generator=rng), torch.arange(states)
    probs = torch.nn.functional.one_hot(drawn, 3).float()
    wanted = step.walk_rows(*to(device, drawn, drafts, cu, order), store, DEPTH)
    moved = to(device, probs, drafts, positions, seeds, cu, order)
    got = coins.walk_coin_rows(*moved, store, DEPTH)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    assert reference.max_depth(store.depths).max() > 0
