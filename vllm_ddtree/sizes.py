"""How many rows, cache slots and logits a step can have: the one place that knows.

vLLM sizes buffers, reservations and profiles from the number of speculative tokens, which here is the number
of nodes; the drafter works on blocks of another length. Both follow from the numbers in :class:`StepSizes`.
Must not know vLLM. Invariant: whatever the scheduler puts into a step, what is written fits into what these
sizes allocate or reserve (tests/core/test_sizes.py draws configurations and steps at random).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

# Rows of drafter logits at once. 2,048 rows keep a GPU busy; at a vocabulary of 151,936 they are 0.6 GiB in
# 16 bits, where the rows of 1,024 requests would be 4.3 GiB.
HEAD_ROWS = 2048


@dataclass(frozen=True)
class StepSizes:
    """Sizes of one engine.

    Attributes:
        nodes: nodes of each request's tree by the number of requests in the step before; [0] is unused.
        horizon: tokens that one drafter forward predicts, its block size less the anchor.
        max_depth: deepest node, at most the horizon.
        batched_tokens: rows of vLLM's buffers for the target (``max_num_batched_tokens``).
        scheduled_tokens: most rows that the scheduler puts into one step, at most ``batched_tokens``.
    """

    nodes: tuple[int, ...]
    horizon: int
    max_depth: int
    batched_tokens: int
    scheduled_tokens: int

    @property
    def max_num_seqs(self) -> int:
        """Most requests in a step."""
        return len(self.nodes) - 1

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree."""
        return max(self.nodes[1:])

    @property
    def draft_rows(self) -> int:
        """Rows that a request has in the drafter's forward: the anchor and one per predicted token.

        The drafter writes as many cache slots behind the last accepted token, whatever the number of nodes.
        """
        return self.horizon + 1

    @property
    def lookahead_slots(self) -> int:
        """Cache slots to reserve behind the rows scheduled for a request.

        With k drafts scheduled, a of them accepted, the drafter writes up to slot context + a + draft_rows,
        and context + k + 1 are reserved for the rows; a = k is the worst case, and a prompt has none.
        """
        return self.draft_rows

    @property
    def drafter_rows(self) -> int:
        """Rows of the drafter's own buffers: a block of every request, or the target's rows as context."""
        return max(self.batched_tokens, self.max_num_seqs * self.draft_rows)

    @property
    def logits_rows(self) -> int:
        """Most rows of target logits in a step, vLLM's warm-up steps of full trees included."""
        return min(self.batched_tokens, self.max_num_seqs * (self.most_nodes + 1))

    @property
    def head_requests(self) -> int:
        """Requests whose drafter logits are computed at once: no more than memory profiling drafts for."""
        return max(1, min(HEAD_ROWS // self.horizon, self.batched_tokens // self.draft_rows))

    @property
    def accepted_rows(self) -> int:
        """Rows of a verified request that can hold accepted tokens once they are committed."""
        return self.max_depth + 1

    def context_rows(self, num_reqs: int) -> int:
        """Rows of target hidden states that the drafter's graph for so many requests takes in.

        What a batch has beyond them, the rows of prompts, goes in before the graph. The number never falls
        as requests grow, since the buffer of all graphs has the rows of the largest.
        """
        return self._context_rows[num_reqs]

    @cached_property
    def _context_rows(self) -> tuple[int, ...]:
        rows = [0]
        for count in range(1, self.max_num_seqs + 1):
            width = min(self.max_depth, self.nodes[count]) + 1
            rows.append(max(rows[-1], count * width))
        return tuple(rows)

    @property
    def requests_at_once(self) -> int:
        """Most requests whose trees all fit into one step; the last ones of a larger batch wait."""
        counts = range(1, self.max_num_seqs + 1)
        too_many = (n for n in counts if n * (self.nodes[n] + 1) > self.scheduled_tokens)
        return next(too_many, self.max_num_seqs + 1) - 1

    @property
    def tokens_for_all(self) -> int:
        """The smallest ``max_num_batched_tokens`` at which every request's tree fits into one step."""
        return max(n * (self.nodes[n] + 1) for n in range(1, self.max_num_seqs + 1))
