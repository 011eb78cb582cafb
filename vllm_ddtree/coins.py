"""The walk with explicit coins over rows of logits, its coins keyed by (seed, position, token).

Owns the noise of walks with coins and their fit to whole trees; the rule itself is `reference.walk_coins`.
Must not know vLLM. Invariant: one (seed, position, token) has one coin, whatever the batch and the tree, so
a seeded run repeats itself; no coin is used for two decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_ddtree import ops, step

if TYPE_CHECKING:
    from vllm_ddtree.engine.state import TreeStore

_FINAL = -1  # stands for the token in the key of the last draw


def keyed_uniform(seed: Tensor, position: Tensor, token: Tensor | int) -> Tensor:
    """float32 in [0, 1), a hash of the key; int64 tensors that broadcast.

    The rounds are the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), the top 24 bits the
    mantissa.
    """
    word = mix(mix(mix(seed) + position) + token)
    return ((word >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def mix(word: Tensor) -> Tensor:
    """One round of the hash: int64 in, int64 out, a bijection."""
    # int64 wraps as the algorithm wants; >> keeps the sign, so the shifted-in bits are cut off.
    word = word + -0x61C8864680B583EB
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


def walk_coin_rows(
    probs: Tensor,
    drafts: Tensor,
    positions: Tensor,
    seeds: Tensor,
    cu_logits: Tensor,
    states: Tensor,
    store: TreeStore,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.walk_coins` over flat rows of logits and the trees of the store.

    probs float32 [R, V], the target's processed distribution at each row; drafts int32 [R], the row's token,
    negative = not a draft; positions int64 [R]; seeds int64 by state; otherwise as `step.walk_rows`, which
    names the results.
    """
    tree, rows = step.padded_trees(drafts, cu_logits, states, store)
    coins = keyed_coins(seeds[states], positions, rows, tree[0])
    return emitted(ops.walk_coins, (*tree, probs[rows], *coins), max_depth)


def keyed_coins(seeds: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The coin of every node, float32 [n, Q], and of the last draw, [n].

    seeds int64 [n]; positions int64 [R]; rows and tokens int64 [n, Q], the row and the token of each node.
    """
    # One hash for both, since each is some thirty launches: the last draw is one more column.
    position = positions[torch.cat((rows, rows[:, :1]), dim=1)]
    token = torch.nn.functional.pad(tokens, (0, 1), value=_FINAL)
    coins = keyed_uniform(seeds[:, None], position, token)
    return coins[:, :-1].contiguous(), coins[:, -1].contiguous()


def emitted(
    walk: Callable[..., None], arguments: Sequence[Tensor], max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a walk of `ops` on arguments whose first is candidates [n, Q]; results as `step.walk_rows`."""
    n, width = arguments[0].shape
    predict = torch.empty(n * width, dtype=torch.int64, device=arguments[0].device)
    accept_index = torch.empty(n, max_depth + 1, dtype=torch.int64, device=predict.device)
    accepted = torch.empty(n, dtype=torch.int32, device=predict.device)
    walk(*arguments, predict, accept_index, accepted)
    sampled = torch.where(accept_index < 0, -1, predict[accept_index.clamp(min=0)])
    return sampled, accept_index, accepted + 1
