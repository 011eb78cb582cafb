"""Which CUDA graphs are captured: those that a batch of trees can meet, and no others.

Owns the sizes given to vLLM and what is dropped of the graphs it makes of them. Must not know what runs in a
graph. Invariant: every whole batch of up to MOST_REQUESTS requests finds a graph of its own width.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from vllm.config.compilation import CUDAGraphMode

# vLLM's own small sizes for PIECEWISE graphs; whole-batch decode graphs need n * (nodes + 1) on top.
_PIECEWISE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
MOST_REQUESTS = _BATCHES[-1]


def most_requests(nodes: Sequence[int]) -> dict[int, int]:
    """Rows of a tree -> the largest batch that has it; ``nodes`` by number of requests, [0] unused.

    A batch has the nodes of its size or, for a step after it shrank, of a larger one.
    """
    return {nodes[count] + 1: count for count in range(1, len(nodes))}


def set_sizes(engine_args: Any, nodes: list[int], horizon: int, max_model_len: int) -> None:
    """Cover whole batches of trees and of the drafter's blocks with FULL graphs, unless the user chose sizes.

    A batch has the nodes of its size or, for a step after it shrank, of a larger one: each width is covered
    up to the largest batch that has it. Sizes that no batch reaches are left out: to capture one, vLLM makes
    up requests longer than the model's. ``nodes`` by number of requests, as ``nodes_by_batch`` returns them.
    """
    compilation = copy.deepcopy(engine_args.compilation_config)
    chosen = compilation.cudagraph_capture_sizes or engine_args.cudagraph_capture_sizes
    if chosen is not None:
        return
    seqs = len(nodes) - 1
    widest = most_requests(nodes)
    widest[horizon + 1] = seqs
    whole = {n * width for width, most in widest.items() for n in (*_BATCHES, most) if n <= most}
    limit = min(
        (engine_args.max_num_seqs or sys.maxsize) * max_model_len,
        engine_args.max_cudagraph_capture_size or compilation.max_cudagraph_capture_size or sys.maxsize,
    )
    compilation.cudagraph_capture_sizes = sorted(n for n in {*_PIECEWISE_SIZES, *whole} if n <= limit)
    # In the list now; vLLM accepts it beside a list only where both say the same.
    engine_args.max_cudagraph_capture_size = compilation.max_cudagraph_capture_size = None
    engine_args.compilation_config = compilation


def keep_reachable(manager: Any, nodes: Sequence[int]) -> None:
    """Leave a CudaGraphManager those FULL graphs of trees that batches match, and find each by its width.

    vLLM rounds every size to whole requests of every width, and so makes graphs of wide trees for more
    requests than ever have them; and it looks for a batch's graph among those of one size only, whatever
    their widths. ``nodes`` as in :func:`most_requests`.
    """
    most = most_requests(nodes)
    by_width: dict[tuple[int, int], list[Any]] = {}
    for desc in sorted(manager._capture_descs.get(CUDAGraphMode.FULL, ()), key=lambda d: d.num_tokens):
        width = desc.uniform_token_count
        graphs = by_width.setdefault((width, desc.num_active_loras), [])
        # The first that holds the largest batch of a width is the last that is needed.
        if width is None or (width in most and (not graphs or graphs[-1].num_reqs < most[width])):
            graphs.append(desc)
    kept = {desc for graphs in by_width.values() for desc in graphs}
    for mode, descs in manager._capture_descs.items():
        descs[:] = [desc for desc in descs if mode != CUDAGraphMode.FULL or desc in kept]
    for (tokens, loras), found in manager._candidates.items():
        rest = [d for d in found if d.cg_mode != CUDAGraphMode.FULL or d.uniform_token_count is None]
        own = [
            next((desc for desc in graphs if desc.num_tokens >= tokens), None)
            for (width, cases), graphs in by_width.items()
            if width is not None and cases == loras
        ]
        found[:] = [desc for desc in own if desc is not None] + rest
