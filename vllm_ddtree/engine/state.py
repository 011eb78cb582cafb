"""The trees of all requests, and the part of them that the current step reads.

``TreeStore`` keeps one tree per request *state* index (batch rows are reordered between steps, state
indices are not). ``TreeStep`` holds what attention and the walk need in batch order; its buffers never
change address, because captured CUDA graphs keep reading them. Nothing here synchronises.
"""

from __future__ import annotations

import torch

_step: TreeStep | None = None


class TreeStore:
    """Trees keyed by request-state index; row ``max_num_reqs`` swallows writes of padded rows.

    Attributes (R = max_num_reqs + 1, Q = nodes + 1, W = ceil(Q / 32)):
        tokens: [R, Q] int64, root at 0 (left 0, the scheduler's last token is the root).
        parents, depths: [R, Q] int32.
        node_logws: [R, Q] float32, cumulative log-probability of each node's path under the drafter.
        num_nodes: [R] int32, real nodes, root not counted.
        next_token, next_sibling: [R, Q] int32, the retrieve buffers.
        mask: [R, Q, W] int32, ancestor bit rows.
        is_chain: [R] bool, requests whose sampling parameters need a chain.
        draft_probs: [R, L, V] float32, what the children of each depth were drawn from; None where they
            are not drawn.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_nodes: int,
        device: torch.device,
        draft_shape: tuple[int, int] | None = None,
    ) -> None:
        rows, width = max_num_reqs + 1, num_nodes + 1
        words = (width + 31) // 32
        self.max_num_reqs = max_num_reqs
        self.num_nodes_max = num_nodes
        i32, i64 = torch.int32, torch.int64
        self.tokens = torch.zeros(rows, width, dtype=i64, device=device)
        self.parents = torch.full((rows, width), -1, dtype=i32, device=device)
        self.depths = torch.zeros(rows, width, dtype=i32, device=device)
        self.node_logws = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.num_nodes = torch.zeros(rows, dtype=i32, device=device)
        self.next_token = torch.full((rows, width), -1, dtype=i32, device=device)
        self.next_sibling = torch.full((rows, width), -1, dtype=i32, device=device)
        self.mask = torch.zeros(rows, width, words, dtype=i32, device=device)
        self.is_chain = torch.zeros(rows, dtype=torch.bool, device=device)
        self.draft_probs: torch.Tensor | None = None
        if draft_shape is not None:
            self.draft_probs = torch.zeros(rows, *draft_shape, dtype=torch.float32, device=device)


class TreeStep:
    """What the current verification step reads, in batch order.

    Attributes:
        max_nodes, q_len, words: nodes B, B + 1, ceil((B + 1) / 32).
        mask: [max_num_reqs, q_len, words] int32, ancestor bit rows; unused rows see only themselves.
        tree_len: [max_num_reqs] int32, rows (root and nodes) of a verification row, 0 for others.
        num_tree_reqs: host count of leading rows that are verified as trees this step.
    """

    def __init__(self, max_num_reqs: int, num_nodes: int, device: torch.device) -> None:
        self.max_nodes = num_nodes
        self.q_len = num_nodes + 1
        self.words = (self.q_len + 31) // 32
        own = torch.arange(self.q_len)
        mask = torch.zeros(self.q_len, self.words, dtype=torch.int64)
        mask[own, own // 32] = 1 << (own % 32)
        mask = torch.where(mask >= 2**31, mask - 2**32, mask).to(torch.int32)
        self.mask = mask.repeat(max_num_reqs, 1, 1).to(device)
        self.tree_len = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.num_tree_reqs = 0


def set_tree_state(step: TreeStep | None) -> None:
    """Make ``step`` the one that this process's attention layers read."""
    global _step
    _step = step


def tree_state() -> TreeStep | None:
    """Return this process's step, or None when the engine in it is not a ddtree engine."""
    return _step
