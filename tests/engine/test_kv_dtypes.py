"""KV caches of another type than the model's: the text of no speculation, or one sentence at start-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from driving import VLLM_0_32
from engines import GPU, SETTINGS, counters, engines, generate, greedy, prompts, tree
from oracle import oracle
from vllm import _custom_ops as ops
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import EngineArgs

from vllm_ddtree.engine import checks

FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
on_a_cpu = pytest.mark.skipif(GPU, reason="about vLLM's CPU kernel")
# vLLM's own condition for a CPU.
with_fp8 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU kernel has fp8 caches with AVX-512 only"
)
BYTES = [token for prompt in prompts(9, seed=5) for token in prompt]
ASKED = [BYTES[:40], BYTES[50:59]]


@on_a_cpu
@with_fp8
@pytest.mark.parametrize(
    ("engine", "drafter"),
    [
        *(({"kv_cache_dtype": dtype}, {}) for dtype in FP8),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}, {}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}),
    ],
    ids=[*FP8, "fp8, a layer skipped", "fp8, not the drafter", "the drafter alone"],
)
def test_text_equals_no_speculation(tiny, engine, drafter):
    """Of vLLM's own kernel, whose rounding the rows must share; accepted rows are moved in between."""
    with engines(tiny, tree(24, **drafter), block_size=32, **engine) as (plain, ours):
        want = generate(plain, ASKED, greedy(40))
        assert generate(ours, ASKED, greedy(40)) == want
        drafted = counters(ours)["vllm:spec_decode_num_accepted_tokens"]
        with oracle([p + a for p, a in zip(ASKED, want, strict=True)], (0, 2, 1, 0, 3)):
            ours.reset_prefix_cache()
            assert generate(ours, ASKED, greedy(40)) == want
        assert counters(ours)["vllm:spec_decode_num_accepted_tokens"] - drafted > 40


@on_a_cpu
@with_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["auto", *FP8])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 0.7)])
def test_rows_and_sums_are_those_of_vllms_kernel(dtype, kind, scales):
    """A checkpoint's scales included: the same code for every key and value, and the same attention."""
    from vllm_ddtree.engine.attention_cpu import TreeCPUAttentionImpl

    heads, kv_heads, size, block, count = 4, 2, 32, 32, 50
    noise = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(count, n, size, generator=noise).to(dtype) for n in (heads, kv_heads, kv_heads)
    )
    key[0, 0, :8] = torch.tensor([500.0, -448, 1e-3, 2e-3, 1e-6, 0, -6e4, 464]).to(dtype)
    k_scale, v_scale = scales
    layer = SimpleNamespace(_k_scale_float=k_scale, _v_scale_float=v_scale, is_draft_layer=True)
    table, slots = torch.tensor([[2, 1]], dtype=torch.int32), torch.arange(block, block + count)
    slots = torch.where(slots < 2 * block, slots + block, slots - block)  # block 2, then block 1
    starts, lens = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    caches = [
        torch.zeros(4, kv_heads, block, 2 * size, dtype=dtype if kind == "auto" else torch.uint8)
        for _ in range(2)
    ]
    want, got = torch.zeros_like(query), torch.zeros_like(query)

    packed = caches[0].view(4, kv_heads, 2 * block, size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *packed, slots, "vec", k_scale, v_scale, kind)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        1, heads, kv_heads, size, lens, dtype, starts, True, -1, "vec", False, kv_cache_dtype=kind
    )
    ops.cpu_attention_with_kv_cache(
        query, *packed, want, starts, lens, size**-0.5, True, None, -1, table, 0.0, schedule, None,
        None, k_scale, v_scale, kind,
    )  # fmt: skip

    impl = object.__new__(TreeCPUAttentionImpl)  # vLLM's __init__ asks for an engine
    impl.scale, impl.kv_cache_dtype = size**-0.5, kind
    impl.do_kv_cache_update(layer, key, value, caches[1], slots)
    step = SimpleNamespace(query_start_loc=starts, seq_lens=lens, block_table=table, causal=True)
    impl.forward(layer, query, key, value, caches[1], step, got)

    # The kernel packs a block's rows its own way, so its codes are compared as a bag per block.
    for half in range(2):
        theirs = packed[half][1:3].reshape(2, -1).float().sort().values
        mine = caches[1][1:3].chunk(2, dim=-1)[half].reshape(2, -1).float().sort().values
        assert torch.equal(theirs, mine)
    close = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=close, atol=close * k_scale)


def refused(target, dtype, **changes):
    """The text of the error that asking for this KV cache raises."""
    args = {key: value for key, value in SETTINGS.items() if key != "seed"}
    with pytest.raises(ValueError) as caught:
        EngineArgs(model=target, kv_cache_dtype=dtype, **(args | changes)).create_engine_config()
    return str(caught.value)


@on_a_cpu
@pytest.mark.parametrize("dtype", sorted({*get_args(CacheDType)} - {"auto", *FP8}))
def test_other_types_are_refused(tiny, dtype):
    """On a float32 model: vLLM's CPU kernel would take the bytes of a cache of 16 bits for float32."""
    text = refused(tiny[0], dtype, speculative_config=tree(16, model=tiny[1]))
    if dtype.endswith("float16") and not VLLM_0_32:  # vLLM 0.33 itself refuses these
        assert "is incompatible with dtype" in text
        return
    assert f"KV cache dtype is {dtype!r}" in text
    assert text.count("\n- ") == 1


@on_a_cpu
def test_another_type_for_the_drafter_alone_is_refused(tiny):
    text = refused(
        tiny[0], "auto", speculative_config=tree(16, model=tiny[1], kv_cache_dtype="int8_per_token_head")
    )
    assert "the drafter's KV cache dtype is 'int8_per_token_head'" in text


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    ("kind", "model", "where"),
    [
        ("auto", torch.float32, "both"),
        ("bfloat16", torch.bfloat16, "both"),
        ("float16", torch.float16, "both"),
        ("bfloat16", torch.float16, "neither"),
        ("float16", torch.bfloat16, "neither"),
        ("bfloat16", torch.float32, "neither"),
        ("fp8", torch.bfloat16, "both"),
        ("fp8", torch.float32, "cpu"),  # FlashAttention has no float32
        ("fp8_e4m3", torch.bfloat16, "both"),
        ("fp8_e5m2", torch.bfloat16, "cpu"),
        ("fp8_inc", torch.bfloat16, "neither"),
        ("fp8_per_token_head", torch.bfloat16, "neither"),
        ("nvfp4", torch.bfloat16, "neither"),
        ("turboquant_k8v4", torch.bfloat16, "neither"),
        ("octave_k3v4", torch.bfloat16, "neither"),  # vLLM 0.33's
        ("a_plugins_own", torch.bfloat16, "neither"),
    ],
)
def test_types_by_platform(kind, model, where, cuda):
    problems = checks.cache_dtype_problems({"the": kind}, model, cuda)
    assert (not problems) == (where == "both" or where == ("cuda" if cuda else "cpu"))
