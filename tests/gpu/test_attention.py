"""Tree attention against its float32 definition; runs on a GPU, or small and slow under TRITON_INTERPRET=1.

Tolerances are absolute, for outputs of order 1: float32 differs by the order of sums only; fp16 and bf16
round probabilities and the output (2^-11 and 2^-8 relative), and the two-part path also rounds the
context part once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import expected, make_case

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from vllm_ddtree.kernels.paged_tree import paged_tree_attention  # noqa: E402
from vllm_ddtree.kernels.tree_attention import Tile, tree_attention_  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
SMS = torch.cuda.get_device_properties(0).multi_processor_count if CUDA else 132
ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
need_cuda = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def run_seeded(case, tile=None):
    out, lse = expected(case, context_only=True)
    out = out.to(case.q.dtype)
    return tree_attention_(
        case.q, case.key_cache, case.value_cache, out, lse.contiguous(), num_sms=SMS, tile=tile,
        **case.shared(),
    )  # fmt: skip


def run_fused(case, num_splits=None, block_m=None):
    # NaN shows a row that was never written.
    out = torch.full_like(case.q, float("nan"))
    return paged_tree_attention(
        case.q, case.key_cache, case.value_cache, out, num_sms=SMS, num_splits=num_splits, block_m=block_m,
        **case.shared(),
    )  # fmt: skip


def error(case, got):
    want, _ = expected(case)
    diff = (got.float() - want).abs()
    assert not diff.isnan().any(), "a row was not written, or the undefined context of an empty row leaked in"
    return diff.max().item()


# a full tree, a short one, a root alone (plain decoding), a prompt, a prompt with drafts, no context
RAGGED = {
    "trees": [9, 4, 1, 0, 6, 9],
    "query_lens": [9, 4, 1, 5, 8, 9],
    "contexts": [37, 0, 16, 20, 3, 0],
    "q_len": 9,
}


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("run", [run_seeded, run_fused], ids=["seeded", "fused"])
def test_ragged_batch_in_float32(run, group):
    case = make_case(**RAGGED, group=group, kv_heads=2, head_size=16, dtype=torch.float32, device=DEVICE)
    assert error(case, run(case)) < ATOL[torch.float32]


@pytest.mark.parametrize("run", [run_seeded, run_fused], ids=["seeded", "fused"])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "NHD", "block_size": 32},
        {"softcap": 3.0},
        {"sinks": True},
        {"head_size": 24},
    ],
    ids=["nhd", "softcap", "sinks", "odd head size"],
)
def test_options_in_float32(run, options):
    shape = {"group": 2, "kv_heads": 2, "head_size": 16, "dtype": torch.float32, "device": DEVICE} | options
    case = make_case(**RAGGED, **shape)
    assert error(case, run(case)) < ATOL[torch.float32]


def test_a_dummy_request_longer_than_its_block_table():
    """vLLM's batches at start-up: rows behind the table are nobody's, but must not be looked for anywhere."""
    shape = {"group": 2, "kv_heads": 1, "head_size": 16, "dtype": torch.float32, "device": DEVICE}
    case = make_case([0], [0], query_lens=[40], q_len=9, **shape)
    want, _ = expected(case)
    table = torch.full((1, 8), 10**6, dtype=torch.int32, device=DEVICE)
    table[0, :2] = case.block_table[0, :2]
    case.block_table = table[:, :2]
    got = run_fused(case)
    assert (got[:32] - want[:32]).abs().max() < ATOL[torch.float32]
    assert not got.isnan().any()


def several_words():
    return make_case(
        [70, 41], [5, 18], group=3, kv_heads=1, head_size=16, dtype=torch.float32, device=DEVICE, q_len=70
    )


@pytest.mark.parametrize(
    "tile", [Tile(16, 32, 4, 2), Tile(64, 32, 4, 2), Tile(16, 64, 4, 2), Tile(64, 128, 4, 2)]
)
def test_tree_over_several_mask_words_and_tiles(tile):
    """Tiles of one, two and four mask words of keys, the last of them past the tree's end."""
    case = several_words()
    assert error(case, run_seeded(case, tile)) < ATOL[torch.float32]


@pytest.mark.parametrize("block_m", [None, 64])
def test_fused_tree_over_several_mask_words_and_tiles(block_m):
    case = several_words()
    assert error(case, run_fused(case, block_m=block_m)) < ATOL[torch.float32]


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_splits_give_the_same_result(num_splits):
    case = make_case([7, 3], [200, 2], group=2, kv_heads=1, head_size=16, dtype=torch.float32, device=DEVICE)
    assert error(case, run_fused(case, num_splits=num_splits)) < ATOL[torch.float32]


def test_non_causal_rows_see_all_rows():
    shape = {"group": 2, "kv_heads": 1, "head_size": 16, "dtype": torch.float32, "device": DEVICE}
    case = make_case([0, 0], [5, 0], query_lens=[6, 40], **shape)
    case.visible = [torch.ones(n, n, dtype=torch.bool) for n in case.lens]
    out = torch.full_like(case.q, float("nan"))
    paged_tree_attention(
        case.q, case.key_cache, case.value_cache, out, num_sms=SMS, non_causal=True, **case.shared()
    )
    assert error(case, out) < ATOL[torch.float32]


def test_a_wrong_mask_bit_shows():
    """The comparison itself must be able to fail: hide one ancestor and the error is far over tolerance."""
    case = make_case([9], [8], group=2, kv_heads=1, head_size=16, dtype=torch.float32, device=DEVICE)
    case.mask[0, 8, 0] &= ~1
    assert error(case, run_seeded(case)) > 100 * ATOL[torch.float32]
    assert error(case, run_fused(case)) > 100 * ATOL[torch.float32]


def test_a_shifted_context_shows():
    case = make_case([9], [8], group=2, kv_heads=1, head_size=16, dtype=torch.float32, device=DEVICE)
    case.ctx += 1
    assert error(case, run_fused(case)) > 100 * ATOL[torch.float32]


def test_strided_head_dimension_is_refused():
    case = make_case([3], [4], group=1, kv_heads=1, head_size=16, dtype=torch.float32, device=DEVICE)
    case.q = case.q.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match="contiguous last dimension"):
        run_fused(case)


@need_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "head_size,group,block_size", [(64, 3, 16), (128, 4, 16), (128, 8, 128), (96, 1, 32), (256, 2, 64)]
)
@pytest.mark.parametrize("run", [run_seeded, run_fused], ids=["seeded", "fused"])
def test_large_ragged_batch(run, head_size, group, block_size, dtype):
    if dtype == torch.float32 and head_size > 128:
        pytest.skip("compiles for half a minute; head size 256 is covered by the other types")
    case = make_case(
        [65, 17, 1, 0, 40, 65, 2], [1000, 0, 33, 70, 4097, 1, 129],
        query_lens=[65, 17, 1, 50, 65, 65, 2], q_len=65,
        group=group, kv_heads=2, head_size=head_size, block_size=block_size, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    assert error(case, run(case)) < ATOL[dtype]


@need_cuda
@pytest.mark.parametrize("nodes", [129, 257, 513])
@pytest.mark.parametrize("run", [run_seeded, run_fused], ids=["seeded", "fused"])
def test_wide_trees(run, nodes):
    case = make_case(
        [nodes, nodes // 2], [300, 0], group=4, kv_heads=2, head_size=128, dtype=torch.bfloat16, device=DEVICE
    )
    assert error(case, run(case)) < ATOL[torch.bfloat16]


@need_cuda
def test_a_replayed_graph_reads_new_trees_and_contexts():
    case = make_case(
        [33, 33], [64, 64], group=4, kv_heads=2, head_size=128, dtype=torch.bfloat16, device=DEVICE, seed=1
    )
    other = make_case(
        [20, 33], [3, 50], query_lens=[33, 33], q_len=33, group=4, kv_heads=2, head_size=128,
        dtype=torch.bfloat16, device=DEVICE, seed=2,
    )  # fmt: skip
    out = torch.empty_like(case.q)
    run = lambda: paged_tree_attention(  # noqa: E731
        case.q, case.key_cache, case.value_cache, out, num_sms=SMS, **case.shared()
    )
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    assert error(case, out) < ATOL[torch.bfloat16]
    for name in ("mask", "tree_len", "ctx"):
        getattr(case, name).copy_(getattr(other, name))
    case.visible, case.ctx_list = other.visible, other.ctx_list
    graph.replay()
    assert error(case, out) < ATOL[torch.bfloat16]


@need_cuda
@pytest.mark.parametrize("one_tree", [True, False], ids=["tree_attention", "its parts"])
def test_agrees_with_xformers(one_tree):
    fmha = pytest.importorskip("xformers.ops.fmha")
    from vllm_ddtree.kernels.xformers_tree import gather_kv, tree_bias, xformers_tree_attention

    contexts, n = [300, 64, 1], 33
    case = make_case(
        [n] * 3, contexts, group=4, kv_heads=2, head_size=128, dtype=torch.bfloat16, device=DEVICE
    )
    if one_tree:
        case.visible = [case.visible[0]] * 3
        case.mask[:3] = case.mask[0]
    visible = torch.stack(case.visible).to(DEVICE)
    bias = tree_bias(visible[0] if one_tree else visible, torch.bfloat16)
    padded = max(contexts) + n
    k, v = (gather_kv(c, case.block_table, padded) for c in (case.key_cache, case.value_cache))
    own = (torch.arange(3, device=DEVICE)[:, None], case.ctx[:, None].long() + torch.arange(n, device=DEVICE))
    prefix = fmha.attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[n] * 3, kv_padding=padded, kv_seqlen=contexts, device=torch.device(DEVICE)
    )
    theirs = xformers_tree_attention(
        case.q.view(3, n, *case.q.shape[1:]), k, v, k[own], v[own], prefix, bias
    ).reshape(case.q.shape)
    assert error(case, theirs) < ATOL[torch.bfloat16]
    assert (run_seeded(case).float() - theirs.float()).abs().max() < ATOL[torch.bfloat16]
    assert (run_fused(case).float() - theirs.float()).abs().max() < ATOL[torch.bfloat16]


@need_cuda
def test_kernels_do_not_synchronise():
    case = make_case([9], [8], group=2, kv_heads=1, head_size=64, dtype=torch.bfloat16, device=DEVICE)
    out, lse = torch.zeros_like(case.q), torch.zeros(2, 9, device=DEVICE)
    shared = case.shared()
    for _ in range(2):  # the first call compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            tree_attention_(case.q, case.key_cache, case.value_cache, out, lse, num_sms=SMS, **shared)
            paged_tree_attention(case.q, case.key_cache, case.value_cache, out, num_sms=SMS, **shared)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


def test_kernels_know_no_vllm():
    """Importing the kernels must not pull vLLM in (in a fresh process, as this one may have loaded it)."""
    modules = "vllm_ddtree.kernels.paged_tree, vllm_ddtree.kernels.xformers_tree"
    code = f"import sys, {modules}; assert 'vllm' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
