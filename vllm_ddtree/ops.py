"""The tree operations the engine calls: compiled kernels where loaded, else the reference.

Owns loading `_C.abi3.so`, its fakes, and the choice per call by device. Must not know vLLM.
Invariant: a call gives the same integers whichever side runs it; all outputs are written in place. Shapes
are in `reference.py`, whose functions of the same names define the results. Compiled calls allocate nothing
and never wait for the device, so they may be captured into a CUDA graph (call once eagerly first: kernels
load on first use).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_ddtree import reference

logger = logging.getLogger("vllm_ddtree")

OPS = ("build", "retrieve", "ancestor_mask", "walk", "walk_coins", "walk_residual", "plan_moves", "move_rows")
# A step's bookkeeping (step.py), which only CUDA has in one launch each.
STEP_OPS = ("top_logps", "build_trees", "begin_step", "walk_rows", "commit_cache", "commit_rows")
_LIBRARY = Path(__file__).with_name("_C.abi3.so")
_REMEDY = (
    "install the wheel (pip install --force-reinstall --no-deps vllm_ddtree-*.whl), or reinstall where a "
    "C++20 compiler and, for a GPU, nvcc 13 are"
)


def _fake(*_args: object) -> None:
    return None  # every op writes into given tensors and returns nothing


def _cut_off(library: Path) -> str | None:
    """Says that a library ends before its section headers, which come last; loading it is a bus error."""
    with library.open("rb") as file:
        head = file.read(64)
        found = file.seek(0, 2)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):
        return None  # the loader says what it is
    start, size, count = struct.unpack_from("<Q10xHH", head, 40)
    wanted = start + size * count
    return f"is cut off: {found} bytes of {wanted}" if found < wanted else None


def _load(library: Path) -> str | None:
    """Loads the extension; returns why not, in one line, when it cannot."""
    if not hasattr(torch.ops.ddtree, "build"):  # a second load would define the ops twice, which aborts
        if not library.exists():
            return f"{library.name} was not built; {_REMEDY}"
        try:
            if cut := _cut_off(library):
                return f"{library.name} {cut}; {_REMEDY}"
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            reason = error.__cause__ or error  # torch names the file, the loader's own line is behind it
            first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
            return (
                f"{library.name} does not load beside torch {torch.__version__} ({first}); it needs "
                f"torch >= 2.10; {_REMEDY}"
            )
    missing = [name for name in OPS + STEP_OPS if not hasattr(torch.ops.ddtree, name)]
    if missing:
        return f"{library.name} lacks {', '.join(missing)}, so it is of another version; {_REMEDY}"
    for name in OPS + STEP_OPS:
        torch.library.register_fake(f"ddtree::{name}", _fake)
    return None


_LOAD_ERROR = _load(_LIBRARY)
_DEVICES = {
    device: _LOAD_ERROR is None
    and all(torch._C._dispatch_has_kernel_for_dispatch_key(f"ddtree::{name}", key) for name in names)
    for device, key, names in (("cpu", "CPU", OPS), ("cuda", "CUDA", OPS + STEP_OPS))
}
_announced: set[str] = set()


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def has_kernels(device: str | None = None) -> bool:
    """Whether compiled kernels serve "cpu" or "cuda" tensors (default: cuda where there is a GPU, else
    cpu)."""
    return _DEVICES.get(device or _default_device(), False)


def kernels_error(device: str | None = None) -> str | None:
    """Why the reference path is used for that device, in one line; None when kernels are used."""
    device = device or _default_device()
    if has_kernels(device):
        return None
    return _LOAD_ERROR or f"{_LIBRARY.name} was built without {device.upper()} kernels; {_REMEDY}"


def _compiled(tensor: Tensor) -> bool:
    # Fake tensors report the device they stand for, so tracing takes the branch that the real call takes.
    device = tensor.device.type
    if _DEVICES.get(device, False):
        return True
    if device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph needs ddtree's compiled kernels, because the reference path waits for the device: "
            f"{kernels_error(device)}"
        )
    if device not in _announced:
        _announced.add(device)
        logger.warning("ddtree: using the slower reference path on %s: %s", device, kernels_error(device))
    return False


def _fill(outputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for output, result in zip(outputs, results, strict=True):
        if output.dtype != result.dtype or output.shape != result.shape:
            raise RuntimeError(
                f"a ddtree output must be {result.dtype} of shape {list(result.shape)}; found {output.dtype} "
                f"of shape {list(output.shape)}; nothing is converted, allocate it as the docstring says"
            )
        output.copy_(result)


def build(
    top_logps: Tensor,
    top_tokens: Tensor,
    budgets: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    node_logws: Tensor,
    num_nodes: Tensor,
) -> None:
    """`reference.build` into tokens, parents, depths, node_logws [n, Q] and num_nodes [n]; max_nodes = Q - 1.

    On CUDA, Q - 1 <= 1024.
    """
    if _compiled(top_logps):
        torch.ops.ddtree.build(top_logps, top_tokens, budgets, tokens, parents, depths, node_logws, num_nodes)
        return
    results = reference.build(top_logps, top_tokens, budgets, tokens.shape[1] - 1)
    _fill((tokens, parents, depths, node_logws, num_nodes), results)


def retrieve(
    parents: Tensor,
    num_nodes: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
) -> None:
    """`reference.retrieve` into retrieve_index int64, retrieve_next_token and retrieve_next_sibling int32,
    [n, Q]."""
    if _compiled(parents):
        torch.ops.ddtree.retrieve(
            parents, num_nodes, retrieve_index, retrieve_next_token, retrieve_next_sibling
        )
        return
    outputs = (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    _fill(outputs, reference.retrieve(parents, num_nodes))


def ancestor_mask(parents: Tensor, num_nodes: Tensor, mask: Tensor) -> None:
    """`reference.ancestor_mask` into mask int32 [n, Q, ceil(Q / 32)]."""
    if _compiled(parents):
        torch.ops.ddtree.ancestor_mask(parents, num_nodes, mask)
        return
    _fill((mask,), (reference.ancestor_mask(parents, num_nodes),))


def walk(
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    predict: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
) -> None:
    """`reference.walk` into predict int64 [n * Q], accept_index int64 [n, depth_limit + 1], accept_token_num
    int32 [n]."""
    tree = (candidates, retrieve_next_token, retrieve_next_sibling, num_nodes)
    if _compiled(candidates):
        torch.ops.ddtree.walk(*tree, target_tokens, predict, accept_index, accept_token_num)
        return
    results = reference.walk(*tree, target_tokens, accept_index.shape[1] - 1)
    _fill((predict, accept_index, accept_token_num), results)


def walk_coins(
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    num_nodes: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    predict: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
) -> None:
    """`reference.walk_coins` into the outputs of `walk`."""
    tree = (candidates, retrieve_next_token, retrieve_next_sibling, num_nodes)
    if _compiled(candidates):
        torch.ops.ddtree.walk_coins(
            *tree, target_probs, coins, final_coins, predict, accept_index, accept_token_num
        )
        return
    results = reference.walk_coins(*tree, target_probs, coins, final_coins, accept_index.shape[1] - 1)
    _fill((predict, accept_index, accept_token_num), results)


def walk_residual(
    candidates: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    num_nodes: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    predict: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
) -> None:
    """`reference.walk_residual` into the outputs of `walk`."""
    tree = (candidates, retrieve_next_token, retrieve_next_sibling, num_nodes)
    scores = (target_probs, draft_probs, coins, final_coins)
    if _compiled(candidates):
        torch.ops.ddtree.walk_residual(*tree, *scores, predict, accept_index, accept_token_num)
        return
    results = reference.walk_residual(*tree, *scores, accept_index.shape[1] - 1)
    _fill((predict, accept_index, accept_token_num), results)


def plan_moves(
    accept_index: Tensor, query_start: Tensor, Q: int, slot_mapping: Tensor, src: Tensor, dst: Tensor
) -> None:
    """`reference.plan_moves` into src, dst int64 [n, D]. slot_mapping = arange(T) plans moves of
    hidden-state rows."""
    if _compiled(accept_index):
        torch.ops.ddtree.plan_moves(accept_index, query_start, Q, slot_mapping, src, dst)
        return
    _fill((src, dst), reference.plan_moves(accept_index, query_start, Q, slot_mapping))


def make_move_table(views: Sequence[Tensor]) -> Tensor:
    """The device-resident table move_rows reads: int64 [C, 8] on the device of the views. Make it once per
    cache.

    views: 4-D [num_blocks, block_size, H, E], any strides with the last dimension contiguous, any dtype, one
    device. Columns: address, num_blocks, block_size, then block, slot and head strides in bytes, H, bytes
    per head (E). The table holds addresses: it is valid as long as the storage of the views is.
    """
    rows = []
    for i, view in enumerate(views):
        if view.dim() != 4 or (view.shape[3] > 1 and view.stride(3) != 1):
            raise ValueError(
                "make_move_table needs 4-D views [num_blocks, block_size, H, E] with the last dimension "
                f"contiguous; view {i} has shape {list(view.shape)} and strides {list(view.stride())}; "
                "rows are copied as bytes, so slice or permute the cache first"
            )
        if view.device != views[0].device:
            raise ValueError(
                f"make_move_table needs all views on one device; view {i} is on {view.device}, view 0 on "
                f"{views[0].device}; one launch moves them all, so make a table per device"
            )
        size = view.element_size()
        strides = [stride * size for stride in view.stride()[:3]]
        rows.append(
            [view.data_ptr(), view.shape[0], view.shape[1], *strides, view.shape[2], view.shape[3] * size]
        )
    if not rows:
        raise ValueError("make_move_table needs at least one view, found none; register the KV caches first")
    return torch.tensor(rows, dtype=torch.int64, device=views[0].device)


def move_rows(views: Sequence[Tensor], table: Tensor, src: Tensor, dst: Tensor) -> None:
    """`reference.apply_moves`: row src[r, d] -> row dst[r, d] in every view, d in order, in one launch.

    table: make_move_table(views); src, dst int64 [n, D] on the device of the views, -1 = skip. Rows of
    different requests must be disjoint. On CUDA, rows outside a view are skipped.
    """
    if _compiled(src):
        torch.ops.ddtree.move_rows(list(views), table, src, dst)
        return
    reference.apply_moves(views, src, dst)
