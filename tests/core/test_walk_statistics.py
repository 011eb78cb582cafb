"""Losslessness of both walks as a measurement, and proof that the measurement sees the known mistakes.

Every outcome (the tokens a step emits) has an exact probability under the target. A scenario is walked many
times and judged by: no outcome of zero probability ever; chi-square over outcomes; mean accepted = sum of
path probabilities. Thresholds are at 5 standard deviations, a false-alarm rate below 1e-6 per check; seeds
are fixed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from core_trees import to, walk_outputs

from vllm_ddtree import ops, reference

SIGMAS = 5.0
ALMOST_ONE = 1 - 2.0**-24


@dataclass
class Scenario:
    tokens: list[int]
    parents: list[int]
    probs: torch.Tensor  # [Q, V]

    def tensors(self, n):
        parents = torch.tensor([self.parents] * n, dtype=torch.int32)
        counts = torch.full((n,), len(self.parents) - 1, dtype=torch.int32)
        _, child, sibling = (
            t[:1].expand(n, -1).contiguous() for t in reference.retrieve(parents[:1], counts[:1])
        )
        return torch.tensor([self.tokens] * n), child, sibling, counts

    def can_say(self, row):
        """Whether every emitted token has a positive probability where it was emitted."""
        node = 0
        for token in row:
            if node is None or float(self.probs[node, token]) <= 0:
                return False
            family = [i for i in range(1, len(self.parents)) if self.parents[i] == node]
            node = next((i for i in family if self.tokens[i] == token), None)
        return True

    def outcomes(self, node=0, prefix=(), mass=1.0):
        """{emitted tokens: probability} by the definition of the target, without any walk."""
        result = {}
        child_of = {}
        for i in range(len(self.parents) - 1, 0, -1):
            if self.parents[i] == node:
                child_of[self.tokens[i]] = i
        row = self.probs[node].double()
        for token, p in enumerate((row / row.sum()).tolist()):
            emitted = (*prefix, token)
            if token in child_of and p > 0:
                result |= self.outcomes(child_of[token], emitted, mass * p)
            elif p > 0:
                result[emitted] = mass * p
        return result


def softmax_scenario():
    rng = torch.Generator().manual_seed(5)
    parents = [-1, 0, 0, 1, 0, 1, 2, 3]
    tokens = [0, 3, 1, 2, 0, 4, 3, 1]
    probs = torch.randn(8, 6, generator=rng).mul(1.5).softmax(-1)
    probs[0, 1] = 0.0  # a drafted token that the target rules out
    probs[0, 5] = 0.0  # the last id of the vocabulary as well
    return Scenario(tokens, parents, probs / probs.sum(-1, keepdim=True))


def covered_scenario():
    """The children are the whole support, and rounding leaves its mass a little below 1."""
    probs = torch.zeros(3, 4)
    probs[:, 0], probs[:, 1] = 0.6, 0.4 * (1 - 2.0**-20)
    return Scenario([9, 0, 1], [-1, 0, 0], probs)


def repeated_scenario():
    """Siblings 1 and 2 carry the same token."""
    probs = torch.tensor([[0.3, 0.3, 0.2, 0.2]]).repeat(4, 1)
    return Scenario([9, 1, 1, 0], [-1, 0, 0, 0], probs)


SCENARIOS = [softmax_scenario, covered_scenario, repeated_scenario]


def coins_for(n, q):
    """(coins, finals, edge): uniform, but for `edge` rows, whose coins are 0 or the largest float below 1."""
    rng = torch.Generator().manual_seed(11)
    edge = torch.arange(n) % 8 == 0
    extreme = torch.where(torch.rand(n, q, generator=rng) < 0.5, 0.0, ALMOST_ONE)
    coins = torch.where(edge.unsqueeze(1), extreme, torch.rand(n, q, generator=rng))
    return coins, torch.rand(n, generator=rng), edge


def emitted_rows(predict, accepted, lengths):
    predict, lengths = predict.tolist(), lengths.tolist()
    return [
        tuple(predict[i] for i in row[: k + 1]) for row, k in zip(accepted.tolist(), lengths, strict=True)
    ]


def sigmas_of(statistic, freedom):
    """Wilson-Hilferty: the cube root of a chi-square over its degrees of freedom is nearly normal."""
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def judge(scenario, rows, edge=None):
    expected = scenario.outcomes()
    impossible = sorted(row for row in set(rows) if not scenario.can_say(row))
    assert not impossible, f"emitted what the target never says: {impossible[:5]}"
    fair = [row for i, row in enumerate(rows) if edge is None or not edge[i]]
    n, counts = len(fair), Counter(fair)
    kept = {o: p * n for o, p in expected.items() if p * n >= 5}
    rest = n - sum(kept.values())
    statistic = sum((counts[o] - e) ** 2 / e for o, e in kept.items())
    freedom = len(kept) - 1
    if rest >= 5:
        statistic += (n - sum(counts[o] for o in kept) - rest) ** 2 / rest
        freedom += 1
    score = sigmas_of(statistic, freedom)
    assert score < SIGMAS, (
        f"chi-square {statistic:.1f} with {freedom} degrees of freedom is {score:.1f} sigma off"
    )
    mean = sum(p * (len(o) - 1) for o, p in expected.items())
    variance = sum(p * (len(o) - 1 - mean) ** 2 for o, p in expected.items())
    measured = sum(len(row) - 1 for row in fair) / n
    assert abs(measured - mean) <= SIGMAS * math.sqrt(variance / n) + 1e-9, (measured, mean)


def path_sum(scenario):
    """Sum over nodes of the target's probability of the path, repeated siblings once: the oracle of
    theory.md."""
    reach, seen, total = {0: 1.0}, set(), 0.0
    for i in range(1, len(scenario.parents)):
        parent, token = scenario.parents[i], scenario.tokens[i]
        row = scenario.probs[parent].double()
        fresh = (parent, token) not in seen
        reach[i] = reach[parent] * float(row[token] / row.sum()) if fresh else 0.0
        seen.add((parent, token))
        total += reach[i]
    return total


@pytest.mark.parametrize("make", SCENARIOS)
def test_mean_accepted_is_the_sum_of_path_probabilities(make):
    scenario = make()
    mean = sum(p * (len(o) - 1) for o, p in scenario.outcomes().items())
    assert mean == pytest.approx(path_sum(scenario), abs=1e-12)


@pytest.mark.parametrize("make", SCENARIOS)
def test_walk_is_lossless(device, make):
    scenario, n = make(), 40_000 if ops.has_kernels(device) else 8_000
    tokens, child, sibling, counts = scenario.tensors(n)
    rng = torch.Generator().manual_seed(3)
    drawn = torch.multinomial(scenario.probs, n, replacement=True, generator=rng).T.contiguous()
    out = walk_outputs(device, *tokens.shape, 4)
    ops.walk(*to(device, tokens, child, sibling, counts, drawn), *out)
    judge(scenario, emitted_rows(*out))


@pytest.mark.parametrize("make", SCENARIOS)
def test_walk_coins_is_lossless(device, make):
    scenario, n = make(), 40_000 if ops.has_kernels(device) else 8_000
    tree = scenario.tensors(n)
    coins, finals, edge = coins_for(n, len(scenario.parents))
    probs = scenario.probs.expand(n, -1, -1).contiguous()
    out = walk_outputs(device, *tree[0].shape, 4)
    ops.walk_coins(*to(device, *tree, probs, coins, finals), *out)
    judge(scenario, emitted_rows(*out), edge)


def coin_walk(scenario, coins, final, mistake=None):
    """A coin walk in which one known mistake can be put."""
    node, out = 0, []
    while True:
        row = [float(p) for p in scenario.probs[node]]
        rejected, tried, accepted = 0.0, [], None
        for child in [i for i in range(1, len(scenario.parents)) if scenario.parents[i] == node]:
            token = scenario.tokens[child]
            if token in tried and mistake != "repeated siblings count twice":
                continue
            share = coins[child] * (1.0 - rejected)
            take = share < row[token] and row[token] > 0
            if mistake == "coin compared with <=":
                take = share <= row[token]
            if mistake == "coin 0 accepts anything":
                take = take or share == 0.0
            if take:
                accepted = child
                break
            tried.append(token)
            rejected += row[token]
        if accepted is None:
            left = [0.0 if t in tried else p for t, p in enumerate(row)]
            goal, running = final * sum(left), 0.0
            pick = len(row) - 1 if mistake == "empty residual gives the last id" else row.index(max(row))
            for token, p in enumerate(left):
                running += p
                if p > 0 and running > goal:
                    pick = token
                    break
            return (*out, pick)
        out.append(scenario.tokens[accepted])
        node = accepted


def judge_all(mistake):
    for make in SCENARIOS:
        scenario, n = make(), 6_000
        coins, finals, edge = coins_for(n, len(scenario.parents))
        rows = [
            coin_walk(scenario, c, f, mistake) for c, f in zip(coins.tolist(), finals.tolist(), strict=True)
        ]
        judge(scenario, rows, edge)


def test_the_measurement_passes_a_right_walk():
    judge_all(None)


@pytest.mark.parametrize(
    "mistake",
    [
        "coin compared with <=",
        "empty residual gives the last id",
        "repeated siblings count twice",
        "coin 0 accepts anything",
    ],
)
def test_the_measurement_sees_the_mistake(mistake):
    with pytest.raises(AssertionError, match=r"never says|sigma off"):
        judge_all(mistake)
