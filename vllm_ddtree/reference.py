"""The definition of every tree operation, in plain Python and torch.

Owns the meaning of build, retrieve, ancestor_mask, walk, walk_coins, walk_residual, plan_moves and
move_rows; each compiled kernel is tested against this file. Must not know vLLM, CUDA or the extension.
Reading a tensor may wait for its device: this is the slow, clear path.
Invariant: inputs are never written to (but for `apply_moves`), and nodes stay in pop order everywhere.

Shapes: n requests, N nodes at most per request (root not counted), Q = N + 1 slots (slot 0 = root), L draft
depths, K candidates per depth, V vocabulary, D = accept_index.shape[1] - 1 accepted drafts at most, W =
ceil(Q / 32).
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _add_f32(a: float, b: float) -> float:
    # A double holds the sum of two floats closely enough that rounding it once gives the float32 sum exactly.
    return ctypes.c_float(a + b).value


def _best_first(logps: list[list[float]], budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """(score, rank tuple) of the `budget` best nodes, in pop order."""
    heap: list[tuple[float, tuple[int, ...], float]] = []

    def push(ranks: tuple[int, ...], prefix: float) -> None:
        depth, rank = len(ranks) - 1, ranks[-1]
        if depth >= len(logps) or rank >= len(logps[depth]):
            return
        score = _add_f32(prefix, logps[depth][rank])
        if score > -math.inf:  # false for NaN too: an absent entry ends its row
            heapq.heappush(heap, (-score, ranks, prefix))

    push((0,), 0.0)
    popped: list[tuple[float, tuple[int, ...]]] = []
    while heap and len(popped) < budget:
        negated, ranks, prefix = heapq.heappop(heap)
        popped.append((-negated, ranks))
        push((*ranks[:-1], ranks[-1] + 1), prefix)
        push((*ranks, 0), -negated)
    return popped


def build(
    top_logps: Tensor, top_tokens: Tensor, budgets: Tensor, max_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Best-first draft tree of each request (DDTree, arXiv 2604.12989; ties go to the smaller rank tuple).

    top_logps float32 [n, L, K], descending in K, -inf or NaN = absent; top_tokens int64 [n, L, K];
    budgets int32 [n], clamped to [0, max_nodes].
    Returns tokens int64, parents int32, depths int32, node_logws float32, all [n, Q], and num_nodes int32
    [n]. The score of a node is the float32 sum of its path in path order. Slot 0 of tokens is left 0 for the
    anchor.
    """
    n, q_len = top_logps.shape[0], max_nodes + 1
    device = top_logps.device
    tokens = torch.zeros(n, q_len, dtype=torch.int64)
    parents = torch.full((n, q_len), -1, dtype=torch.int32)
    depths = torch.zeros(n, q_len, dtype=torch.int32)
    node_logws = torch.full((n, q_len), -math.inf, dtype=torch.float32)
    node_logws[:, 0] = 0.0
    num_nodes = torch.zeros(n, dtype=torch.int32)
    all_logps, all_tokens = top_logps.tolist(), top_tokens.tolist()
    for r, budget in enumerate(budgets.tolist()):
        popped = _best_first(all_logps[r], min(max(budget, 0), max_nodes))
        index: dict[tuple[int, ...], int] = {(): 0}
        for i, (score, ranks) in enumerate(popped, start=1):
            index[ranks] = i
            tokens[r, i] = all_tokens[r][len(ranks) - 1][ranks[-1]]
            parents[r, i] = index[ranks[:-1]]
            depths[r, i] = len(ranks)
            node_logws[r, i] = score
        num_nodes[r] = len(popped)
    return (
        tokens.to(device),
        parents.to(device),
        depths.to(device),
        node_logws.to(device),
        num_nodes.to(device),
    )


def expected_accepted(node_logws: Tensor) -> Tensor:
    """Expected accepted drafts if the target agreed with the drafter: float32 [n], sum of exp over non-root
    nodes."""
    return node_logws[:, 1:].exp().sum(dim=1)


def max_depth(depths: Tensor) -> Tensor:
    """Depth of the deepest node of each tree, int32 [n] (0 for a lone root)."""
    return depths.amax(dim=1)


def _check_count(r: int, count: int, q_len: int) -> None:
    if not 0 <= count < q_len:
        raise ValueError(
            f"num_nodes[{r}] must be in [0, {q_len - 1}], found {count}: the tree arrays have {q_len} slots "
            "with the root; pass what build wrote"
        )


def _trees(parents: Tensor, num_nodes: Tensor) -> list[list[int]]:
    """Parent lists cut to the real nodes, checked: 0 <= parent < node."""
    rows = []
    for r, (row, count) in enumerate(zip(parents.tolist(), num_nodes.tolist(), strict=True)):
        _check_count(r, count, len(row))
        for i in range(1, count + 1):
            if not 0 <= row[i] < i:
                raise ValueError(
                    f"parents[{r}, {i}] must be in [0, {i}), found {row[i]}: nodes are in pop order, a "
                    "parent comes before its children; pass the arrays that build wrote"
                )
        rows.append(row[: count + 1])
    return rows


def retrieve(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First-child / next-sibling encoding of each tree (contract.md, 3).

    parents int32 [n, Q], num_nodes int32 [n]. Returns retrieve_index int64 [n, Q] (flat slot r * Q + i),
    retrieve_next_token int32 [n, Q], retrieve_next_sibling int32 [n, Q] (-1 = none). Siblings are in
    ascending node index, which in pop order is descending node_logws.
    """
    n, q_len = parents.shape
    index = torch.arange(n * q_len, dtype=torch.int64).view(n, q_len)
    next_token = torch.full((n, q_len), -1, dtype=torch.int32)
    next_sibling = torch.full((n, q_len), -1, dtype=torch.int32)
    for r, row in enumerate(_trees(parents, num_nodes)):
        last_child: dict[int, int] = {}
        for i in range(1, len(row)):
            parent = row[i]
            if parent in last_child:
                next_sibling[r, last_child[parent]] = i
            else:
                next_token[r, parent] = i
            last_child[parent] = i
    return index.to(parents.device), next_token.to(parents.device), next_sibling.to(parents.device)


def ancestor_mask(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Packed visibility: int32 [n, Q, W]; bit j % 32 of word j // 32 of row i is set iff j is i or its
    ancestor.

    Padding rows see themselves only, so that no attention row is empty.
    """
    n, q_len = parents.shape
    words = (q_len + 31) // 32
    seen = torch.zeros(n, q_len, words * 32, dtype=torch.int64)
    for r, row in enumerate(_trees(parents, num_nodes)):
        for i in range(q_len):
            seen[r, i, i] = 1
            if 0 < i < len(row):
                seen[r, i] |= seen[r, row[i]]
    packed = (seen.view(n, q_len, words, 32) << torch.arange(32)).sum(dim=-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).to(parents.device)


def _children(node: int, next_token: list[int], next_sibling: list[int], count: int) -> list[int]:
    """Children of a node in sibling order; every pointer must lead to a later real node."""
    found, at, pointer = [], node, next_token[node]
    while pointer != -1:
        if not at < pointer <= count:
            raise ValueError(
                f"a child or sibling pointer of node {at} must be -1 or in ({at}, {count}], found {pointer}: "
                "pointers only lead forward to real nodes; pass the arrays that retrieve wrote"
            )
        found.append(pointer)
        at, pointer = pointer, next_sibling[pointer]
    return found


def _record(
    paths: list[list[int]], emitted: list[list[int]], q_len: int, depth: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    n = len(paths)
    predict = torch.full((n * q_len,), -1, dtype=torch.int64)
    accept_index = torch.full((n, depth + 1), -1, dtype=torch.int64)
    accept_token_num = torch.zeros(n, dtype=torch.int32)
    for r, (path, tokens) in enumerate(zip(paths, emitted, strict=True)):
        for d, (node, token) in enumerate(zip(path, tokens, strict=True)):
            predict[r * q_len + node] = token
            accept_index[r, d] = r * q_len + node
        accept_token_num[r] = len(path) - 1
    return predict.to(device), accept_index.to(device), accept_token_num.to(device)


def walk(
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    depth_limit: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's own tokens through the tree (theory.md, "Walk").

    candidates int64 [n, Q] (the token of each node), pointers int32 [n, Q], num_nodes int32 [n],
    target_tokens int64 [n, Q] (what the target drew at each node). At most `depth_limit` drafts are accepted.
    Returns predict int64 [n * Q] (token emitted at each visited flat slot, -1 elsewhere), accept_index int64
    [n, depth_limit + 1] (flat slots, root first, -1 after), accept_token_num int32 [n] (root not counted).
    """
    paths, emitted = [], []
    rows = zip(
        candidates.tolist(), retrieve_next_token.tolist(), retrieve_next_sibling.tolist(),
        num_nodes.tolist(), target_tokens.tolist(), strict=True,
    )  # fmt: skip
    for r, (tokens, next_token, next_sibling, count, drawn) in enumerate(rows):
        _check_count(r, count, len(tokens))
        path, out = [0], [drawn[0]]
        while len(path) <= depth_limit:
            children = _children(path[-1], next_token, next_sibling, count)
            match = next((c for c in children if tokens[c] == out[-1]), None)
            if match is None:
                break
            path.append(match)
            out.append(drawn[match])
        paths.append(path)
        emitted.append(out)
    return _record(paths, emitted, candidates.shape[1], depth_limit, candidates.device)


def residual_token(probs: Tensor, excluded: Sequence[int], coin: float) -> int:
    """Inverse-CDF draw from probs [V] without the `excluded` ids: the first id whose running mass exceeds
    coin * mass.

    When rounding let every token of the support be rejected, the most probable token of the whole row is
    returned: never an id of zero probability while another exists.
    """
    mass = _positive(probs)
    left = mass.clone()
    left[[t for t in excluded if 0 <= t < left.numel()]] = 0.0
    pick = _inverse_cdf(left, coin)
    return int(mass.argmax()) if pick is None else pick


def _positive(probs: Tensor) -> Tensor:
    """Probabilities as float64, what is not above zero (NaN too) as zero."""
    return torch.where(probs > 0, probs, 0.0).double()


def _inverse_cdf(mass: Tensor, coin: float) -> int | None:
    """The first id whose running mass exceeds coin * total; None when there is no mass."""
    running = mass.cumsum(0)
    total = float(running[-1])
    if total <= 0.0:
        return None
    above = (running > coin * total) & (mass > 0)
    return int(above.nonzero()[0]) if bool(above.any()) else int((mass > 0).nonzero()[-1])


def walk_coins(
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    num_nodes: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    depth_limit: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk with explicit coins: each child c is accepted with p(c) / (1 - mass rejected before it).

    target_probs float32 [n, Q, V] (processed probabilities at each node), coins float32 [n, Q] in [0, 1)
    (coin of a node is used when that node is tried), final_coins float32 [n] in [0, 1) (the bonus draw).
    Otherwise as `walk`. A repeated sibling token is tried once; a token of zero probability is never
    accepted; masses are float64.
    """
    probs = target_probs.detach().cpu()
    vocab = probs.shape[2]

    def decide(r: int, node: int, _depth: int, children: _Children, final: float) -> tuple[int | None, int]:
        rejected, tried = 0.0, []
        for child, token, coin in children:
            if token in tried:
                continue
            p = float(probs[r, node, token]) if 0 <= token < vocab else 0.0
            if p > 0.0 and coin * (1.0 - rejected) < p:
                return child, token
            tried.append(token)
            rejected += p if p > 0.0 else 0.0
        return None, residual_token(probs[r, node], tried, final)

    tree = (candidates, retrieve_next_token, retrieve_next_sibling, num_nodes)
    return _walk_deciding(decide, *tree, coins, final_coins, depth_limit)


_Children = list[tuple[int, int, float]]  # (node, token, coin), in sibling order
_Decide = Callable[[int, int, int, _Children, float], tuple[int | None, int]]


def _walk_deciding(
    decide: _Decide,
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    num_nodes: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    depth_limit: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root on, `decide(request, node, depth, children, final coin)` gives the accepted child, None
    where the walk ends, and the token emitted at the node. At the depth limit there are no children."""
    paths, emitted = [], []
    rows = zip(
        candidates.tolist(), retrieve_next_token.tolist(), retrieve_next_sibling.tolist(),
        num_nodes.tolist(), coins.tolist(), final_coins.tolist(), strict=True,
    )  # fmt: skip
    for r, (tokens, next_token, next_sibling, count, coin, final_coin) in enumerate(rows):
        _check_count(r, count, len(tokens))
        path: list[int] = []
        out: list[int] = []
        node: int | None = 0
        while node is not None:
            path.append(node)
            depth = len(path) - 1
            found = _children(node, next_token, next_sibling, count) if depth < depth_limit else []
            children = [(child, tokens[child], coin[child]) for child in found]
            node, token = decide(r, node, depth, children, final_coin)
            out.append(token)
        paths.append(path)
        emitted.append(out)
    return _record(paths, emitted, candidates.shape[1], depth_limit, candidates.device)


def walk_residual(
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    num_nodes: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    depth_limit: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk over children that were *drawn*, without replacement, in sibling order, from the drafter.

    draft_probs float32 [n, L, V], L >= depth_limit: row d is what children of nodes at depth d were drawn
    from. A child x is accepted with min(1, p(x) / q(x)); a rejection turns p into max(p - q, 0) and takes x
    out of q, both normalised again (recursive rejection sampling: Jeon et al., arXiv 2402.14160). As every
    q is a multiple of the first over untried tokens, p stays max(p - scale * q, 0) with one growing scale.

    Otherwise as `walk_coins`. An infinite coin rejects whatever p says. A child with a repeated token or
    with q(x) = 0 cannot have been drawn and is passed over; when rounding leaves nothing of p, trying ends.
    """
    probs, drawn_from = target_probs.detach().cpu(), draft_probs.detach().cpu()
    vocab = probs.shape[2]

    def decide(r: int, node: int, depth: int, children: _Children, final: float) -> tuple[int | None, int]:
        p = left = _positive(probs[r, node])
        q, scale = _positive(drawn_from[r, depth]) if children else p, 0.0
        for child, token, coin in children:
            if not 0 <= token < vocab or float(q[token]) <= 0.0:  # a tried token has no q left
                continue
            mass, open_mass = float(left.sum()), float(q.sum())
            if not mass > 0.0:
                break
            if coin * float(q[token]) * mass < float(left[token]) * open_mass:
                return child, token
            scale += mass / open_mass
            p, q = p.clone(), q.clone()
            p[token] = q[token] = 0.0
            left = _positive(p - scale * q) if scale > 0.0 else p
        pick = _inverse_cdf(left, final)
        return None, int(_positive(probs[r, node]).argmax()) if pick is None else pick

    tree = (candidates, retrieve_next_token, retrieve_next_sibling, num_nodes)
    return _walk_deciding(decide, *tree, coins, final_coins, depth_limit)


def plan_moves(
    accept_index: Tensor, query_start: Tensor, Q: int, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Which row of the cache (or of any per-token array) goes where once the walk is known.

    accept_index int64 [n, D + 1]; query_start int32 or int64 [n], flat row of each root in the step's
    arrays, -1 = skip; slot_mapping int64 [T], the slot each flat row was written to. Returns src, dst int64
    [n, D]: accepted draft d moves slot_mapping[start + local_d] -> slot_mapping[start + d]; -1 where there
    is nothing to move.
    """
    starts = query_start.to(torch.int64).unsqueeze(1)
    limit = slot_mapping.shape[0]
    path = accept_index[:, 1:]
    steps = torch.arange(1, path.shape[1] + 1, device=path.device).unsqueeze(0)
    source, target = starts + path.remainder(Q), starts + steps
    valid = (path >= 0) & (starts >= 0) & (starts < limit) & (source < limit) & (target < limit)
    if limit == 0:
        return torch.full_like(path, -1), torch.full_like(path, -1)
    src = slot_mapping[source.clamp(0, limit - 1)]
    dst = slot_mapping[target.clamp(0, limit - 1)]
    valid &= (src != dst) & (src >= 0) & (dst >= 0)
    return torch.where(valid, src, -1), torch.where(valid, dst, -1)


def apply_moves(views: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """In place: for d in order, row src[r, d] of every view is copied to row dst[r, d] (either -1 = skip).

    views: 4-D [num_blocks, block_size, H, E]; row s is [s // block_size, s % block_size]. Rows of different
    requests must be disjoint.
    """
    for view in views:
        size = view.shape[1]
        raw = (
            view.view(torch.uint8) if view.dtype.itemsize == 1 else view
        )  # float8 has no indexed copy on CPU
        for d in range(src.shape[1]):
            use = (src[:, d] >= 0) & (dst[:, d] >= 0)
            a, b = src[use, d], dst[use, d]
            raw[b // size, b % size] = raw[a // size, a % size]


def move_rows(views: Sequence[Tensor], src: Tensor, dst: Tensor) -> list[Tensor]:
    """`apply_moves` on copies: returns the moved views."""
    copies = [view.clone() for view in views]
    apply_moves(copies, src, dst)
    return copies
