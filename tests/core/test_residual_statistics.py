"""The residual rule end to end without an engine: children drawn, tree built, walked; 200,000 walks.

The target is a table of next-token distributions by prefix. What a step emits is completed with draws from
the table, so that whole sequences of one length have known probabilities. Thresholds as in
test_walk_statistics: 5 standard deviations per check, a false-alarm rate below 1e-6 each, seeds fixed; four
mistakes are put in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from core_trees import to
from test_walk_statistics import SIGMAS, sigmas_of

from vllm_ddtree import residual, step
from vllm_ddtree.engine.state import TreeStore

SCENARIOS, WALKS, DEPTH, NODES = 10, 20_000, 3, 9


@dataclass
class Model:
    logits: torch.Tensor  # [DEPTH, V], the drafter's
    table: torch.Tensor  # [prefixes, V], the target's; the prefixes after c are c * V + 1 + token

    def after(self, prefix: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return prefix * self.table.shape[1] + 1 + token


def random_model(seed: int) -> Model:
    rng = torch.Generator().manual_seed(seed)
    vocab = 3 + seed % 2
    table = (torch.randn(sum(vocab**d for d in range(DEPTH + 1)), vocab, generator=rng) * 1.5).softmax(-1)
    kind = torch.randint(0, 4, (len(table),), generator=rng)
    table[kind == 0] = 1.0  # equal probabilities
    table[kind == 1, 0] = 0.0  # ruled out
    table[kind == 2, -1] += 30.0  # nearly certain
    logits = torch.randn(DEPTH, vocab, generator=rng) * 1.5
    logits[seed % DEPTH, 1] = -math.inf if seed % 3 == 0 else 0.0
    return Model(logits, table / table.sum(-1, keepdim=True))


def emit(model: Model, device: str, mistake: str | None = None, absent: int | None = None) -> torch.Tensor:
    """What WALKS requests emit, int64 [WALKS, DEPTH + 1], completed from the table; `absent` stands in the
    place of every draft where given."""
    rng = torch.Generator().manual_seed(1)
    vocab = model.table.shape[1]
    store = TreeStore(WALKS, NODES, device, (DEPTH, vocab))
    seeds, states = torch.arange(WALKS), torch.arange(WALKS)  # consecutive seeds, as users choose them
    heat = torch.tensor([0.7, 1.0, 1.6])[states % 3]
    positions = 500 + torch.arange(DEPTH).expand(WALKS, -1)
    logits = model.logits.expand(WALKS, -1, -1)
    if mistake == "children by probability, not drawn":
        heat = heat * 0
    logps, tokens = residual.draw_children(
        *to(device, logits, heat, seeds, positions, states), vocab, store.draft_probs
    )
    budgets = (2 + states % (NODES - 1)).int()
    if mistake == "children dropped by their token":
        budgets = torch.where(tokens.view(WALKS, DEPTH, -1)[:, 0, 0].cpu() == 0, 0, NODES).int()
    if mistake == "another distribution than the drawn one":
        store.draft_probs.copy_(store.draft_probs.sqrt())
    nodes = torch.zeros(WALKS, NODES, dtype=torch.int64, device=device)
    shape = (WALKS, DEPTH, vocab)
    step.build_trees(logps.view(shape), tokens.view(shape), *to(device, budgets, states), store, nodes)

    prefix = torch.zeros(WALKS, NODES + 1, dtype=torch.int64)
    names, parents = store.tokens[:-1].cpu(), store.parents[:-1].cpu().long()
    for i in range(1, NODES + 1):
        prefix[:, i] = model.after(prefix.gather(1, parents[:, i : i + 1].clamp(min=0))[:, 0], names[:, i])
    probs = model.table[prefix.clamp(max=len(model.table) - 1)].view(-1, vocab)
    cu = torch.arange(WALKS + 1, dtype=torch.int32) * (NODES + 1)
    drafts = torch.cat((torch.zeros(WALKS, 1, dtype=torch.int64), nodes.cpu()), 1).flatten().int()
    if absent is not None:
        drafts.view(WALKS, -1)[:, 1:] = absent
    depths = store.depths[:-1].cpu().flatten() + 499
    if mistake == "one coin for all":
        seeds, depths = seeds * 0, depths * 0
    sampled, _, count = residual.walk_residual_rows(
        *to(device, probs, drafts, depths, seeds, cu, states.int()), store, DEPTH
    )
    sampled, count = sampled.cpu(), count.cpu()
    at = torch.zeros(WALKS, dtype=torch.int64)
    for d in range(DEPTH + 1):
        rows = model.table[at]
        emitted = d < count
        assert bool((rows.gather(1, sampled[:, d : d + 1].clamp(min=0))[emitted] > 0).all()), "never says"
        fresh = torch.multinomial(rows, 1, generator=rng)[:, 0]
        sampled[:, d] = torch.where(emitted, sampled[:, d], fresh)
        at = model.after(at, sampled[:, d])
        at = at if d < DEPTH else at * 0
    assert int(count.max()) == 1 if absent is not None else int(count.max()) > 1
    return sampled


def judge(model: Model, emitted: torch.Tensor) -> None:
    vocab = model.table.shape[1]
    expected = torch.tensor([float(WALKS)], dtype=torch.float64)
    prefix = torch.zeros(1, dtype=torch.int64)
    for _ in range(DEPTH + 1):
        expected = (expected[:, None] * model.table[prefix].double()).flatten()
        prefix = model.after(prefix[:, None], torch.arange(vocab)).flatten()
    cell = sum(emitted[:, d] * vocab ** (DEPTH - d) for d in range(DEPTH + 1))
    counts = torch.bincount(cell, minlength=len(expected)).double()
    assert float(counts[expected == 0].sum()) == 0, "never says"
    kept = expected >= 5
    statistic = float(((counts - expected) ** 2 / expected)[kept].sum())
    freedom = int(kept.sum()) - 1
    rest = float(expected[~kept].sum())
    if rest >= 5:
        statistic += float((counts[~kept].sum() - rest) ** 2 / rest)
        freedom += 1
    score = sigmas_of(statistic, freedom)
    assert score < SIGMAS, f"chi-square {statistic:.1f}, {freedom} degrees of freedom: {score:.1f} sigma off"


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_residual_rule(device, seed):
    model = random_model(seed)
    judge(model, emit(model, device))


@pytest.mark.parametrize(
    "mistake",
    [
        "another distribution than the drawn one",
        "children by probability, not drawn",
        "one coin for all",
        "children dropped by their token",
    ],
)
def test_the_measurement_sees_the_mistake(device, mistake):
    with pytest.raises(AssertionError, match=r"never says|sigma off"):
        for seed in range(3):
            model = random_model(seed)
            judge(model, emit(model, device, mistake))


@pytest.mark.parametrize("seed", range(3))
def test_placeholders_are_no_draws(device, seed):
    """vLLM pads a request that joins with drafts that nobody drew; its tree is that of an earlier request.

    Taken for draws that a grammar ruled out, they would take the drafter's mass out of the target's.
    """
    model = random_model(seed)
    judge(model, emit(model, device, absent=step.PLACEHOLDER))
    with pytest.raises(AssertionError, match="sigma off"):
        judge(model, emit(model, device, absent=-1))


def test_a_placeholder_ends_the_tree(device):
    """Nodes before it are the smaller tree, whatever lies behind."""
    store = TreeStore(1, 3, torch.device(device))
    store.next_token[0] = torch.tensor([1, 3, -1, -1])
    store.next_sibling[0, 1] = 2
    store.num_nodes[0] = 3
    drafts = torch.tensor([9, 5, step.PLACEHOLDER, 7], dtype=torch.int32)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    states = torch.zeros(1, dtype=torch.int64)
    (_, child, sibling, count), _ = step.padded_trees(*to(device, drafts, cu, states), store)
    assert count.tolist() == [1]
    assert (child[0, :2].tolist(), sibling[0, :2].tolist()) == ([1, -1], [-1, -1])


def test_children_are_drawn_without_replacement(device):
    """The first two of 100,000 orders, against q(a) q(b) / (1 - q(a)); the kept distribution is q."""
    n, vocab = 100_000, 4
    logits = torch.tensor([1.0, 0.0, -0.5, -3.0]).expand(n, 1, vocab)
    probs = torch.zeros(n + 1, 1, vocab, device=device)
    arguments = (logits, torch.full((n,), 1.3), torch.arange(n), torch.full((n, 1), 7), torch.arange(n))
    scores, tokens = residual.draw_children(*to(device, *arguments), 3, probs)
    q = (logits[0, 0] / 1.3).softmax(-1).double()
    torch.testing.assert_close(probs[:-1].cpu(), q.float().expand(n, 1, vocab))
    torch.testing.assert_close(scores.cpu(), q.sort(descending=True).values[:3].log().float().expand(n, 3))
    tokens = tokens.cpu()
    counts = (
        torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab**2).double().view(vocab, vocab)
    )
    expected = n * q[:, None] * q / (1 - q[:, None])
    expected.fill_diagonal_(0)
    assert float(counts.diagonal().sum()) == 0
    off = ~torch.eye(vocab, dtype=torch.bool)
    statistic = float(((counts - expected) ** 2 / expected.clamp(min=1e-9))[off].sum())
    assert statistic < 11 + 5 * math.sqrt(22), statistic


def test_at_temperature_0_children_come_by_probability(device):
    """Padded rows go to the last row of the store; equal seeds and positions give equal orders."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 2, 50, generator=rng)
    heat, seeds = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([3, 5, 5])
    positions, states = torch.tensor([[8, 9]] * 4), torch.tensor([0, 1, 2, -1])
    logits[2] = logits[1]
    probs = torch.zeros(4, 2, 50, device=device)
    arguments = to(device, logits, heat, seeds, positions, states)
    scores, tokens = residual.draw_children(*arguments, 6, probs)
    greedy = step.top_logps(logits[0].to(device), 6)
    assert torch.equal(tokens[:2], greedy[1])
    torch.testing.assert_close(scores[:2], greedy[0])
    assert torch.equal(tokens[2:4], tokens[4:6])
    assert not torch.equal(tokens[2:4], step.top_logps(logits[1].to(device), 6)[1])
    for state, row in ((0, 0), (1, 1), (2, 2), (3, 3)):
        torch.testing.assert_close(probs[state].cpu(), logits[row].softmax(-1))


def test_the_launch_is_the_definition():
    """kernels/race.py against residual.race; on a machine without a GPU in Triton's interpreter."""
    from vllm_ddtree.kernels.race import race as launch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator().manual_seed(0)
    logps = (torch.randn(3, 5000, generator=rng) * 3).log_softmax(-1)
    bases, drawn = torch.tensor([5, -(2**62), 2**63 - 1]), torch.tensor([True, False, True])
    rows = torch.tensor([2, 0, 3])
    wanted, kept = logps.clone(), torch.zeros(4, 5000)
    residual.race(wanted, bases, drawn, rows, kept)
    keys, probs, bases, drawn, rows = to(device, logps.clone(), torch.zeros(4, 5000), bases, drawn, rows)
    launch(keys, bases, drawn, rows, probs)
    torch.testing.assert_close(keys.cpu(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(probs.cpu(), kept, rtol=2e-6, atol=0)
    assert torch.equal(keys[1].cpu(), logps[1]) and not torch.equal(keys[0].cpu(), logps[0])
