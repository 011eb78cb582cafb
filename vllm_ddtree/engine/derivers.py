"""The verification rules: target scores on a tree in, accepted paths and emitted tokens out.

Owns deriving (contract.md, 1) behind one signature; :class:`TreeScorer` calls it and the commit can't tell
rules apart. A new rule is a new class here and an entry in ``DERIVERS``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_ddtree import coins, residual, step
from vllm_ddtree.engine.state import TreeStore
from vllm_ddtree.options import TreeOptions

# sampled [n, D + 1] int64 (-1 after), accept_index [n, D + 1] int64 (request * (nodes + 1) + node, root
# first, -1 after), num_sampled [n] int32
Derived = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Scores:
    """What the target says about the rows of a batch (R rows of logits, n requests).

    Attributes:
        processed: [R, V] logits after the sampling parameters.
        drafts: [R] int32, the row's token; negative where vLLM ruled the draft out (placeholder, grammar).
        drafted: [R] int32, the same, but negative at placeholders only, where nothing was drafted.
        positions: [R] int64, context + depth.
        row_states: [R], the request state of each row.
        states, states_np: [n], the request state of each request.
        cu_logits: [n + 1] int32.
    """

    processed: torch.Tensor
    drafts: torch.Tensor
    drafted: torch.Tensor
    positions: torch.Tensor
    row_states: torch.Tensor
    states: torch.Tensor
    states_np: np.ndarray
    cu_logits: torch.Tensor


class Deriver(ABC):
    """A verification rule.

    Attributes:
        float32_copies: [R, V] float32 tensors alive at once in a decision, ``processed`` among them.
    """

    float32_copies = 1

    def __init__(self, sampler: Sampler, store: TreeStore, options: TreeOptions) -> None:
        assert options.max_depth is not None
        self._sampler, self._store, self._max_depth = sampler, store, options.max_depth

    @abstractmethod
    def __call__(self, scores: Scores) -> Derived:
        """Decide every request of the batch."""


class DrawDeriver(Deriver):
    """The default: the target draws its own token at every node, with the noise it would have used without
    speculation, and the walk follows the drawn tokens (theory.md, "Walk"). The text is the same."""

    def __call__(self, scores: Scores) -> Derived:
        """Draw at every row, then walk."""
        return step.walk_rows(
            self.draw(scores), scores.drafts, scores.cu_logits, scores.states, self._store, self._max_depth
        )

    def draw(self, scores: Scores) -> torch.Tensor:
        """The target's own token at every row, [R] int64, keyed by (seed, position)."""
        states = self._sampler.sampling_states
        if not np.any(states.temperature.np[scores.states_np]):
            return scores.processed.argmax(dim=-1)
        return gumbel_sample(
            scores.processed,
            scores.row_states,
            states.temperature.gpu,
            states.seeds.gpu,
            scores.positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self._sampler.use_fp64_gumbel,
        )


class CoinDeriver(Deriver):
    """Siblings tried in order, each accepted with p / (1 - rejected mass), the rest drawn from what is left.

    Target-distributed, and repeatable by seed, but its noise is its own: a seeded run differs from the run
    without speculation. It needs the probabilities of every row in float32.
    """

    float32_copies = 4  # also the probabilities, the certain ones, and their mix
    _walk = staticmethod(coins.walk_coin_rows)

    def __call__(self, scores: Scores) -> Derived:
        """Turn logits into distributions, then walk with keyed coins."""
        return self._walk(
            self._probabilities(scores),
            self._drafts(scores),
            scores.positions,
            self._sampler.sampling_states.seeds.gpu,
            scores.cu_logits,
            scores.states,
            self._store,
            self._max_depth,
        )

    def _drafts(self, scores: Scores) -> torch.Tensor:
        """int32 [R], as the walk takes them."""
        return scores.drafts

    def _probabilities(self, scores: Scores) -> torch.Tensor:
        """float32 [R, V]; all on one token where the temperature is 0."""
        probs = scores.processed.float().softmax(dim=-1)
        temperature = self._sampler.sampling_states.temperature
        if np.all(temperature.np[scores.states_np]):
            return probs
        best = torch.zeros_like(probs).scatter_(1, scores.processed.argmax(dim=-1, keepdim=True), 1.0)
        return torch.where(temperature.gpu[scores.row_states, None] == 0, best, probs)


class ResidualDeriver(CoinDeriver):
    """For trees whose children were drawn from the drafter: accepted with p / q, else p becomes what q leaves
    of it. Accepts more than the others where the target is undecided (temperature >= 1)."""

    _walk = staticmethod(residual.walk_residual_rows)

    def _drafts(self, scores: Scores) -> torch.Tensor:
        # What a grammar ruled out was drawn, and takes its share of the target; a placeholder must not.
        return torch.where(scores.drafted < 0, step.PLACEHOLDER, scores.drafts)


class SyntheticDeriver(DrawDeriver):
    """A path of a wanted length instead of the walk's, for benchmarks with dummy weights.

    Its depth is the mean rounded up or down by the root's position, and its nodes are spread over the
    tree, so that the commit moves as many rows as a real path would.
    """

    def __init__(self, sampler: Sampler, store: TreeStore, options: TreeOptions) -> None:
        super().__init__(sampler, store, options)
        assert options.synthetic_acceptance_length is not None
        self._wanted = options.synthetic_acceptance_length - 1

    def __call__(self, scores: Scores) -> Derived:
        """Walk, so that the time is spent, then impose the length."""
        drawn = self.draw(scores)
        _, accept_index, _ = step.walk_rows(
            drawn, scores.drafts, scores.cu_logits, scores.states, self._store, self._max_depth
        )
        count = torch.minimum(self._store.num_nodes[scores.states], scores.cu_logits.diff() - 1)
        starts = scores.cu_logits[:-1].long()
        n, width = accept_index.shape
        # 0.618...: the golden ratio spreads consecutive positions evenly over [0, 1).
        threshold = (scores.positions[starts].double() * 0.6180339887498949) % 1.0
        depth = (math.floor(self._wanted) + (threshold < self._wanted % 1.0)).clamp(max=width - 1)
        depth = torch.minimum(depth.to(torch.int32), count)
        nth = torch.arange(width, device=count.device)
        node = nth * torch.div(count, depth.clamp(min=1), rounding_mode="floor")[:, None]
        inside = nth <= depth[:, None]
        slots = torch.arange(n, device=count.device)[:, None] * self._store.tokens.shape[1] + node
        sampled = drawn[starts[:, None] + torch.where(inside, node, 0)]
        return sampled, torch.where(inside, slots, -1), depth + 1


DERIVERS = {"draw": DrawDeriver, "coins": CoinDeriver, "residual": ResidualDeriver}


def make_deriver(sampler: Sampler, store: TreeStore, options: TreeOptions) -> Deriver:
    """The rule that the options ask for."""
    if options.synthetic_acceptance_length is not None:
        return SyntheticDeriver(sampler, store, options)
    return DERIVERS[options.deriver](sampler, store, options)
