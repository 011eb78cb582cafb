"""The vLLM backend around the tree kernel: row planning, metadata and whole forward passes.

On a GPU FlashAttention is the real one; without, a PyTorch stand-in takes its place (and leaves NaN where
a row has no keys), so that the plumbing is tested on every machine. Tolerances as in test_attention.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace as Stub

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import expected, make_case

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from vllm_ddtree.engine import attention_gpu as backend  # noqa: E402
from vllm_ddtree.engine import state  # noqa: E402
from vllm_ddtree.engine.attention_plan import plan_rows, split_bound  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
ATOL = 2e-2 if CUDA else 2e-5
SHAPE = {"group": 4, "kv_heads": 2, "head_size": 128 if CUDA else 16, "dtype": DTYPE, "device": DEVICE}
Q_LEN = 33
need_cuda = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def torch_flash(*, q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, **rest):
    """FlashAttention's paged varlen forward in float32; rows without keys get NaN and an infinite lse."""
    lse = torch.empty(q.shape[1], q.shape[0])
    group = q.shape[1] // k.shape[2]
    for r, keys in enumerate(seqused_k.tolist()):
        a, b = cu_seqlens_q[r].item(), cu_seqlens_q[r + 1].item()
        if keys == 0:
            out[a:b], lse[:, a:b] = math.nan, math.inf
            continue
        pos = torch.arange(keys)
        block = block_table[r, pos // k.shape[1]].long()
        kr, vr = (c[block, pos % k.shape[1]].repeat_interleave(group, 1) for c in (k, v))
        s = torch.einsum("qhd,khd->hqk", q[a:b], kr) * softmax_scale
        if causal:
            s = s.masked_fill(pos[None, :] > torch.arange(b - a)[:, None] + keys - (b - a), -math.inf)
        out[a:b], lse[:, a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1), vr), s.logsumexp(-1)
    return (out, lse) if rest.get("return_softmax_lse") else out


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    if not CUDA:
        monkeypatch.setattr(backend._fa, "flash_attn_varlen_func", torch_flash, raising=False)
    yield
    state.set_tree_state(None)


def make_builder(graphs=False, kv_dtype="auto", dtype=torch.bfloat16, draft=False, builder=None):
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=SHAPE["kv_heads"], head_size=SHAPE["head_size"], dtype=dtype
    )
    heads = SHAPE["kv_heads"] * SHAPE["group"]
    config = Stub(
        model_config=Stub(
            dtype=dtype,
            rswa_window=None,
            is_mm_prefix_lm=False,
            hf_config=Stub(model_type="qwen3"),
            get_num_attention_heads=lambda parallel: heads,
        ),
        parallel_config=Stub(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        cache_config=Stub(cache_dtype=kv_dtype),
        compilation_config=Stub(
            cudagraph_mode=CUDAGraphMode.FULL if graphs else CUDAGraphMode.NONE,
            max_cudagraph_capture_size=512,
            static_forward_context={"layer": Stub(is_draft_layer=draft)},
        ),
        attention_config=Stub(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=Stub(enable_jit_warmup=False),
        scheduler_config=Stub(max_num_seqs=16, max_num_batched_tokens=4096),
        speculative_config=None,
    )
    builder = builder or backend.TreeFlashAttentionMetadataBuilder
    return builder(spec, ["layer"], config, torch.device(DEVICE))


def make_impl(kv_dtype="auto"):
    heads = SHAPE["kv_heads"] * SHAPE["group"]
    impl = backend.TreeFlashAttentionImpl(
        heads, SHAPE["head_size"], SHAPE["head_size"] ** -0.5, SHAPE["kv_heads"], None, None, kv_dtype
    )
    if not CUDA:
        impl.vllm_flash_attn_version = 3
    return impl


def set_state(case, num_tree_reqs):
    step = state.TreeStep(16, Q_LEN - 1, torch.device(DEVICE))
    rows = len(case.lens)
    step.mask[:rows] = case.mask[:rows]
    step.tree_len[:rows] = case.tree_len[:rows]
    step.num_tree_reqs = num_tree_reqs
    state.set_tree_state(step)
    return step


def common_of(case):
    lens = torch.tensor(case.lens, dtype=torch.int32, device=DEVICE)
    return CommonAttentionMetadata(
        query_start_loc=case.cu_q,
        query_start_loc_cpu=case.cu_q.cpu(),
        seq_lens=case.ctx + lens,
        num_reqs=len(case.lens),
        num_actual_tokens=sum(case.lens),
        max_query_len=max(case.lens),
        max_seq_len=max(c + n for c, n in zip(case.ctx_list, case.lens, strict=True)),
        block_table_tensor=case.block_table,
        slot_mapping=torch.zeros(sum(case.lens), dtype=torch.int64, device=DEVICE),
        causal=True,
    )


def kv_cache_of(case):
    return torch.cat([case.key_cache, case.value_cache], -1).transpose(1, 2)


def make_layer(case, draft=False):
    scale = lambda x: torch.tensor(x, device=DEVICE)  # noqa: E731
    return Stub(
        _q_scale=scale(case.q_scale),
        _k_scale=scale(case.k_scale),
        _v_scale=scale(case.v_scale),
        is_draft_layer=draft,
    )


def forward(case, metadata, draft=False, fused=False, kv_dtype="auto"):
    impl = make_impl(kv_dtype)
    impl._fused = fused
    out = torch.zeros(case.q.shape, dtype=DTYPE, device=DEVICE)
    key = torch.zeros(1, device=DEVICE)  # written to the cache before; attention must not read it
    impl.forward(make_layer(case, draft), case.q, key, key, kv_cache_of(case), metadata, out)
    return out


def error(case, out):
    diff = (out.float() - expected(case)[0]).abs()
    assert not diff.isnan().any()
    return diff.max().item()


TREES = dict(trees=[33, 5, 1, 0, 20], contexts=[40, 0, 17, 9, 3], query_lens=[33, 5, 1, 7, 33], q_len=Q_LEN)  # noqa: C408
MIXED = dict(trees=[33, 8, 0, 0], contexts=[40, 0, 5, 0], query_lens=[33, 8, 50, 40], q_len=Q_LEN)  # noqa: C408


@pytest.mark.parametrize("graphs", [False, True])
def test_batch_of_trees(graphs):
    case = make_case(**TREES, **SHAPE)
    set_state(case, 3)
    metadata = make_builder(graphs).build(0, common_of(case))
    assert metadata.tree.num_reqs == 5 and metadata.tree.rest is None
    assert error(case, forward(case, metadata)) < ATOL
    assert error(case, forward(case, metadata, fused=True)) < ATOL


@pytest.mark.parametrize("graphs", [False, True])
def test_trees_with_prompts_behind(graphs):
    case = make_case(**MIXED, **SHAPE)
    set_state(case, 2)
    metadata = make_builder(graphs).build(0, common_of(case))
    assert metadata.tree.num_reqs == 2 and metadata.tree.rest.num_actual_tokens == 90
    assert error(case, forward(case, metadata)) < ATOL


def test_a_stale_mask_shows():
    """The forward comparison can fail: with one request's mask lost the error is far over tolerance."""
    case = make_case(**TREES, **SHAPE)
    step = set_state(case, 3)
    step.mask[0] = step.mask[15]  # never set: every row sees itself only
    assert error(case, forward(case, make_builder().build(0, common_of(case)))) > 5 * ATOL


def test_prompts_alone_take_vllms_path():
    case = make_case([0, 0], [0, 4], query_lens=[40, 7], q_len=Q_LEN, **SHAPE)
    set_state(case, 0)
    metadata = make_builder().build(0, common_of(case))
    assert getattr(metadata, "tree", None) is None
    assert error(case, forward(case, metadata)) < ATOL


def test_a_draft_layer_ignores_the_plan():
    """A draft layer that shares the target's metadata attends causally over the whole sequence."""
    case = make_case(**TREES, **SHAPE)
    set_state(case, 5)
    out = forward(case, make_builder().build(0, common_of(case)), draft=True)
    case.visible = [torch.tril(torch.ones(n, n, dtype=torch.bool)) for n in case.lens]
    assert error(case, out) < ATOL


def test_only_metadata_without_a_plan_is_refreshed_in_place(monkeypatch):
    """A captured draft that refreshed its metadata would keep the plan's old context lengths."""
    stock = backend.FlashAttentionMetadataBuilder
    monkeypatch.setattr(stock, "supports_draft_decode_metadata_update", True)
    refreshed = lambda **what: make_builder(**what).supports_draft_decode_metadata_update  # noqa: E731
    assert refreshed(draft=True) == refreshed(draft=True, builder=stock)
    assert not refreshed(draft=False)
    assert not refreshed(draft=True, dtype=torch.float32)


@pytest.mark.parametrize(
    "lens,num_tree_reqs,want",
    [
        ([33, 33, 0, 0], 0, (4, 33)),  # a FULL graph's padding, and a step whose trees are all placeholders
        ([33, 5, 1], 2, (3, 33)),
        ([1, 1, 1], 3, (0, 0)),
        ([33, 5, 40], 2, (2, 33)),
        ([33, 40, 5], 3, (1, 33)),
        ([1, 1, 40], 2, (0, 0)),
        ([40, 5], 0, (0, 0)),
        ([33, 5, 40], 0, (0, 0)),
    ],
)
def test_plan_rows(lens, num_tree_reqs, want):
    starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    assert plan_rows(starts, Q_LEN, num_tree_reqs) == want


def test_capture_and_replay_agree_on_the_plan():
    """Uniform batches get one plan, whatever the runner says of their trees."""
    case = make_case([33, 33], [0, 0], q_len=Q_LEN, **SHAPE)
    plans = []
    for num_tree_reqs in (0, 1, 2):
        set_state(case, num_tree_reqs)
        plan = make_builder(graphs=True).build(0, common_of(case)).tree
        plans.append((plan.num_reqs, plan.num_tokens, plan.max_query_len, plan.context.max_num_splits))
    assert plans[0][:3] == (2, 66, 33) and len(set(plans)) == 1


def test_split_bound():
    assert split_bound(64, 65, 32, 8, 132, 32) == 1  # 64 * 3 tiles * 8 heads fill the device
    assert split_bound(1, 17, 32, 8, 132, 32) == 32
    assert split_bound(1, 65, 32, 8, 132, 32) == 22
    assert split_bound(1, 65, 32, 8, 132, 0) == 0  # 0 is "FlashAttention decides", outside graphs


def test_sliding_windows_are_refused():
    with pytest.raises(NotImplementedError, match="full attention"):
        backend.TreeFlashAttentionImpl(8, 64, 1.0, 2, None, 128, "auto")


def test_probe_finds_nothing_missing(monkeypatch):
    assert backend.probe() == []
    monkeypatch.delattr(backend._fa, "is_quantized_kv_cache")
    assert "is_quantized_kv_cache" in backend.probe()[0]


def test_float32_goes_through_the_fused_kernel():
    case = make_case(**MIXED, **SHAPE | {"dtype": torch.float32})
    set_state(case, 2)
    metadata = make_builder(dtype=torch.float32).build(0, common_of(case))
    impl = make_impl()
    out = torch.zeros_like(case.q)
    impl.forward(make_layer(case), case.q, None, None, kv_cache_of(case), metadata, out)
    assert error(case, out) < 2e-5


@need_cuda
def test_fp8_cache():
    """FlashAttention 3 keeps probabilities in fp8 over the context (3 mantissa bits), our kernel in bf16."""
    fp8 = torch.float8_e4m3fn
    case = make_case(**TREES, **SHAPE)
    case.q_scale, case.k_scale, case.v_scale = 0.02, 0.03, 0.04
    case.q = (case.q.float() / case.q_scale).clamp(-448, 448).to(fp8)
    case.key_cache = (case.key_cache.float() / case.k_scale).clamp(-448, 448).to(fp8)
    case.value_cache = (case.value_cache.float() / case.v_scale).clamp(-448, 448).to(fp8)
    set_state(case, 3)
    metadata = make_builder(kv_dtype="fp8", dtype=torch.bfloat16).build(0, common_of(case))

    def run(fused):
        impl = make_impl("fp8")
        impl._fused = fused
        out = torch.zeros(case.q.shape, dtype=DTYPE, device=DEVICE)
        cache = torch.cat([case.key_cache.view(torch.uint8), case.value_cache.view(torch.uint8)], -1)
        impl.forward(make_layer(case), case.q, None, None, cache.transpose(1, 2), metadata, out)
        return out

    assert error(case, run(fused=True)) < 3e-2
    two_part = run(fused=False)
    assert error(case, two_part) < 0.25
    assert (two_part.float() - expected(case)[0]).abs().mean() < 1e-2


@need_cuda
def test_a_full_graph_follows_trees_contexts_and_padding():
    """Capture on dummies without context, replay with real contexts, trees and a padded row."""
    case = make_case([33, 20, 33, 0], [300, 0, 77, 0], query_lens=[33, 33, 33, 0], q_len=Q_LEN, **SHAPE)
    real = common_of(case)
    builder, impl, layer = make_builder(graphs=True), make_impl(), make_layer(case)
    step = set_state(case, 0)
    tokens = 4 * 33
    q = torch.zeros(tokens, *case.q.shape[1:], dtype=DTYPE, device=DEVICE)
    out = torch.zeros_like(q)
    cache = kv_cache_of(case)
    starts = torch.arange(0, tokens + 1, 33, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.full((4,), 33, dtype=torch.int32, device=DEVICE)
    table = torch.zeros_like(case.block_table)
    common = real.replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=seq_lens,
        num_actual_tokens=tokens,
        max_seq_len=4096,
        block_table_tensor=table,
    )
    saved = step.tree_len.clone()
    step.tree_len.zero_()
    impl.forward(layer, q, None, None, cache, builder.build_for_cudagraph_capture(common), out)
    metadata = builder.build_for_cudagraph_capture(common)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(layer, q, None, None, cache, metadata, out)

    step.tree_len.copy_(saved)
    step.num_tree_reqs = 3
    q[:99] = case.q
    starts.copy_(real.query_start_loc)
    seq_lens.copy_(real.seq_lens)
    table.copy_(case.block_table)
    builder.build(0, common.replace(query_start_loc_cpu=starts.cpu(), max_seq_len=real.max_seq_len))
    graph.replay()
    assert error(case, out[:99]) < ATOL
