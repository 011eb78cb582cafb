"""The residual rule: children drawn from the drafter without replacement, and the walk that corrects for it.

Owns what is drawn (one order per depth, shared by all nodes of the depth: only one of them is walked), the
distributions it was drawn from, and the noise; the walk itself is `reference.walk_residual`. Must not know
vLLM. Invariants: the shape of a tree depends on the drafter's distributions only, never on what was drawn
from them; noise is keyed by (seed, position, token), apart from every other noise of the engine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_ddtree import ops, step
from vllm_ddtree.coins import emitted, keyed_coins, mix

if TYPE_CHECKING:
    from vllm_ddtree.engine.state import TreeStore

_RACE = 0x5261636544726166  # keeps this noise apart from the coins, which have the same keys
_LARGEST = 1 - 2.0**-24


def draw_children(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    states: Tensor,
    top_k: int,
    draft_probs: Tensor,
) -> tuple[Tensor, Tensor]:
    """One order of tokens per depth, drawn without replacement from the drafter, and the scores of its ranks.

    logits [n, L, V] of the drafter; temperature float32 and seeds int64 by state; positions int64 [n, L];
    states int64 [n], negative = a padded row; draft_probs float32 [S + 1, L, V] receives
    softmax(logits / temperature) by state, its last row that of padded rows. Where the temperature is 0,
    tokens come by probability and no noise is used.
    Returns logps float32 and tokens int64 [n * L, top_k], as `step.top_logps`; the scores are the sorted
    log-probabilities, so that they do not depend on the draw.
    """
    n, depths, vocab = logits.shape
    known = states.clamp(min=0)
    heat = temperature[known][:, None, None]
    logps = logits.float().div(torch.where(heat > 0, heat, 1.0)).log_softmax(dim=-1).view(-1, vocab)
    scores, _ = step.top_logps(logps, top_k)
    first = torch.where(states < 0, draft_probs.shape[0] - 1, states) * depths
    race(
        logps,
        mix(mix(seeds[known] ^ _RACE)[:, None] + positions).flatten(),
        (heat > 0).expand(n, depths, 1).flatten(),
        (first[:, None] + torch.arange(depths, device=first.device)).flatten(),
        draft_probs.view(-1, vocab),
    )
    return scores, step.top_logps(logps, top_k)[1]


def race(logps: Tensor, bases: Tensor, drawn: Tensor, rows: Tensor, probs: Tensor) -> None:
    """In place: logps float32 [R, V] become keys whose descending order is a draw without replacement.

    bases int64 [R], the hash of seed and position; drawn bool [R]: other rows keep logps as keys. Row
    `rows[i]` of probs float32 [rows, V] becomes exp(logps[i]). The key is logp + Gumbel noise, which is -log
    of the arrival of an exponential of rate p (Kool et al., arXiv 1903.06059).
    """
    if logps.is_cuda:
        from vllm_ddtree.kernels.race import race as launch

        launch(logps, bases, drawn, rows, probs)
        return
    probs.index_copy_(0, rows, logps.exp())
    word = mix(bases[:, None] + torch.arange(logps.shape[1], device=logps.device))
    # 32 bits as float32 keep their precision near 0, where the winners are.
    u = (((word >> 32) & 0xFFFFFFFF).float() + 0.5).mul(2.0**-32).clamp(max=_LARGEST)
    logps.sub_(torch.where(drawn[:, None], torch.log1p(-u).neg().log(), 0.0))


def walk_residual_rows(
    probs: Tensor,
    drafts: Tensor,
    positions: Tensor,
    seeds: Tensor,
    cu_logits: Tensor,
    states: Tensor,
    store: TreeStore,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.walk_residual` over flat rows of logits and the trees of the store; all as `walk_coin_rows`.

    A draft that was ruled out (negative) was drawn nevertheless: it counts as rejected, whatever p says. A
    placeholder was not, and the tree that the store holds for it is another's: there is no tree.
    """
    assert store.draft_probs is not None
    (candidates, *pointers, count), rows = step.padded_trees(drafts, cu_logits, states, store)
    tokens = store.tokens[states]
    coins, last = keyed_coins(seeds[states], positions, rows, tokens)
    coins = torch.where(candidates < 0, math.inf, coins)
    tree = (tokens, *pointers, count)
    return emitted(ops.walk_residual, (*tree, probs[rows], store.draft_probs[states], coins, last), max_depth)
