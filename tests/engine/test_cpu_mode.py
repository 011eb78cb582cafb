"""The CPU mode's stand-ins return what vLLM's own kernels are defined to return."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.dflash import speculator

from vllm_ddtree.engine import cpu_kernels, cpu_mode

VOCAB = 1100  # two blocks of the gumbel kernel, and no multiple of 32


@pytest.fixture(scope="module", autouse=True)
def _installed():
    cpu_mode.install_torch_kernels()


@pytest.fixture
def stock_gumbel():
    """vLLM's own gumbel_sample, still running its Triton kernel."""
    from vllm.triton_utils.dispatcher import _registry

    return _registry["vllm.v1.worker.gpu.sample.gumbel.gumbel_sample"][0]


def _draw(function, logits, temperatures, rows=None, **more):
    rows = torch.arange(len(logits)) if rows is None else rows
    temperature = torch.tensor(temperatures, dtype=torch.float32)
    seeds = torch.arange(len(temperature)) * 7919 + 3
    places = torch.arange(len(logits)) + 11
    return function(logits, rows, temperature, seeds, places, False, False, **more)


def test_installing_twice_keeps_the_first(stock_gumbel):
    before = gumbel.gumbel_sample
    cpu_mode.install_torch_kernels()
    assert gumbel.gumbel_sample is before
    assert before is not stock_gumbel


@pytest.mark.parametrize("temperatures", [[0.0] * 4, [0.0, 1.0, 0.7, 0.0], [1.0] * 4])
@pytest.mark.parametrize("fp64", [False, True])
def test_gumbel_draws_the_stock_tokens(stock_gumbel, temperatures, fp64):
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    expected = _draw(stock_gumbel, logits.clone(), temperatures, use_fp64=fp64)
    found = _draw(gumbel.gumbel_sample, logits.clone(), temperatures, use_fp64=fp64)
    assert found.tolist() == expected.tolist()
    assert found.dtype == expected.dtype
    if any(temperatures):
        assert found.tolist() != logits.argmax(dim=-1).tolist()


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, pos_ptr, SIZE: tl.constexpr):
    """The middle of vLLM's gumbel_noised_argmax, from its own helpers."""
    token = tl.arange(0, SIZE)
    u = gumbel.murmur3_uniform32(tl.load(seed_ptr), tl.load(pos_ptr), token)
    tl.store(out_ptr + token, -tl.log(-gumbel._log1p_neg_stable(u)))


@pytest.mark.parametrize("seed, pos", [(0, 0), (42, 7), (-3, 131071), (2**62 + 12345, (1 << 30) + 9)])
def test_gumbel_noise_is_the_stock_noise_bit_by_bit(seed, pos):
    size = 16384
    expected = torch.empty(size)
    _noise_kernel[(1,)](expected, torch.tensor(seed), torch.tensor(pos), SIZE=size)
    found = cpu_kernels._gumbel_noise(seed, pos, size)
    assert np.array_equal(found.view(np.int32), expected.numpy().view(np.int32))
    assert found.std() > 1.2  # a Gumbel's is 1.28


@pytest.mark.parametrize("apply_temperature", [True, False])
@pytest.mark.parametrize("is_drafting", [True, False])
def test_gumbel_options(stock_gumbel, apply_temperature, is_drafting):
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(10)) * 4
    arguments = (
        torch.tensor([2, 0, 1, 1, 2, 0]),
        torch.tensor([0.3, 0.0, 2.5]),
        torch.tensor([17, 5, 2**40]),
        torch.arange(6) * 50,
        apply_temperature,
        is_drafting,
    )
    expected = stock_gumbel(logits.clone(), *arguments).tolist()
    assert gumbel.gumbel_sample(logits, *arguments).tolist() == expected


def test_gumbel_takes_the_first_of_equals(stock_gumbel):
    logits = torch.zeros(3, VOCAB)
    logits[0, [5, 900, 1050]] = 2.0  # equals in one block and across blocks
    logits[1, [1030, 1090]] = 2.0
    logits[2] = float("-inf")
    expected = _draw(stock_gumbel, logits.clone(), [0.0] * 3)
    assert _draw(gumbel.gumbel_sample, logits, [0.0] * 3).tolist() == expected.tolist()
    assert expected.tolist() == [5, 1030, 0]


def test_gumbel_ignores_padding_rows(stock_gumbel):
    """Row index -1 is padding: temperature 0, whatever the last request's is."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = torch.tensor([-1, 0])
    expected = _draw(stock_gumbel, logits.clone(), [0.0, 1.0], rows)
    assert _draw(gumbel.gumbel_sample, logits, [0.0, 1.0], rows).tolist() == expected.tolist()


def test_gumbel_fills_the_logits_cache():
    """A draft that asks for its logits to be kept gets them, greedy or not."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(7))
    cache = torch.zeros(2, 1, VOCAB)
    more = {"logits_cache": cache, "logits_cache_col": torch.tensor(0)}
    assert _draw(gumbel.gumbel_sample, logits, [0.0, 0.0], **more).tolist() == logits.argmax(-1).tolist()
    assert torch.equal(cache[:, 0], logits)
    cache.zero_()
    arguments = (torch.arange(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.arange(2))
    gumbel.gumbel_sample(logits, *arguments, False, False, cache, torch.tensor(0))
    assert torch.equal(cache[:, 0], logits)


def _kept(row, k, p):
    """Indices that top-k then top-p keep, by definition; ``row`` without equal values."""
    order = np.argsort(-row.astype(np.float64))
    order = order[: k if k is not None else None]
    weight = np.exp(row[order].astype(np.float64) - row.max())
    weight /= weight.sum()
    before = np.cumsum(weight) - weight  # kept while what lies above it is less than p
    return set(order[before < (1.0 if p is None else p)].tolist())


@pytest.mark.parametrize("ks", [None, [1, 5, VOCAB]])
@pytest.mark.parametrize("ps", [None, [0.3, 0.9, 1.0]])
def test_top_k_top_p_keeps_what_the_definition_keeps(ks, ps):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8)) * 3
    k = None if ks is None else torch.tensor(ks, dtype=torch.int32)
    p = None if ps is None else torch.tensor(ps)
    masked = topk_topp_sampler.apply_top_k_top_p(logits.clone(), k, p)
    for i, row in enumerate(masked):
        kept = torch.isfinite(row)
        wanted = _kept(logits[i].numpy(), None if ks is None else ks[i], None if ps is None else ps[i])
        if ps is None or ps[i] < 1.0:
            assert set(kept.nonzero().flatten().tolist()) == wanted
        assert torch.equal(row[kept], logits[i][kept])


@pytest.mark.parametrize("vocab", [VOCAB, 64])
def test_grammar_bitmask_bans_the_zero_bits(vocab):
    """Three masks over two requests of 2 and 1 rows; a mask past its request's rows bans nothing."""
    draw = np.random.default_rng(9)
    words = -(-vocab // 32)
    packed = draw.integers(-(2**31), 2**31, size=(4, words), dtype=np.int64).astype(np.int32)
    stride = 8
    mapping = torch.tensor([0, 1, stride, stride + 1], dtype=torch.int32)
    logits = torch.zeros(3, vocab)
    structured_outputs._apply_grammar_bitmask_kernel[(4, 1)](
        logits, vocab, mapping, torch.tensor([0, 2, 3], dtype=torch.int32), torch.from_numpy(packed),
        words, vocab, MASK_STRIDE=stride, BLOCK_SIZE=8192,
    )  # fmt: skip
    allowed = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little")[:3, :vocab].astype(bool)
    assert np.array_equal(np.isneginf(logits.numpy()), ~allowed)


@pytest.mark.parametrize("name", ["TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"])
def test_problem_names_what_to_set(monkeypatch, name):
    assert cpu_mode.cpu_mode_problem() is None
    monkeypatch.delenv(name)
    problem = cpu_mode.cpu_mode_problem()
    assert problem is not None
    assert f"{name}=1" in problem
    monkeypatch.setenv(name, "0")
    assert f"{name}=1" in (cpu_mode.cpu_mode_problem() or "")


def test_platform_hook_touches_nothing_unless_asked(monkeypatch):
    from triton.backends import backends

    before = dict(backends)
    monkeypatch.delitem(backends, "cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    cpu_mode.platform_hook()
    assert "cpu" not in backends
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpu_mode.platform_hook()
    assert set(backends) == set(before)
    assert backends["cpu"].driver.is_active()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("from_anchor", [False, True])
def test_drafter_inputs_are_the_stock_inputs(seed, from_anchor):
    """Ragged requests, rejected rows, prefill chunks, null blocks, positions past the last block."""
    draw = np.random.default_rng(seed)
    reqs, most, width, block, tokens = int(draw.integers(1, 5)), 6, 8, 16, 300
    lengths = draw.integers(1, 40, size=reqs)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    context = draw.integers(0, 40, size=reqs)
    ints = {"dtype": torch.int32}
    batch = SimpleNamespace(
        num_reqs=reqs,
        num_scheduled_tokens=lengths,
        positions=torch.from_numpy(
            np.concatenate([np.arange(c, c + lengths[i]) for i, c in enumerate(context)])
        ),
        query_start_loc=torch.tensor(starts, **ints),
        idx_mapping=torch.from_numpy(draw.permutation(most)[:reqs].astype(np.int32)),
    )
    inputs = {
        "input_batch": batch,
        "num_sampled": torch.from_numpy(draw.integers(0, 3, size=reqs).astype(np.int32)),
        "num_rejected": torch.from_numpy((lengths * draw.random(reqs)).astype(np.int32)),
        "last_sampled": torch.arange(100, 100 + most)[:, None],
        "next_prefill_tokens": torch.arange(200, 200 + most, **ints),
        "input_temperature": torch.rand(most),
        "input_seeds": torch.arange(most) * 11,
        "block_table": torch.from_numpy(draw.integers(0, 9, size=(most, 5)).astype(np.int32)),
    }
    scalars = dict(zip(
        ("block_size", "cp_rank", "cp_size", "cp_interleave", "parallel_drafting_token_id"),
        (block, 0, 1, 1, 7), strict=True,
    ))  # fmt: skip
    scalars |= {"num_query_per_req": width, "num_speculative_steps": width - (0 if from_anchor else 1)}
    scalars |= {"max_num_reqs": most, "max_num_tokens": tokens, "max_model_len": 90}

    def run(function):
        names = ("query_slot_mapping", "context_positions", "context_slot_mapping", "sample_pos")
        out = {name: torch.full((tokens,), -9) for name in names}
        out["sample_indices"] = torch.full((most * width,), -9)
        out["sample_idx_mapping"] = torch.full((most * width,), -9, **ints)
        out |= {"temperature": torch.zeros(most), "seeds": torch.zeros(most, dtype=torch.int64)}
        buffers = {"input_ids": torch.full((tokens,), -9, **ints), "positions": torch.full((tokens,), -9)}
        buffers["query_start_loc"] = torch.full((most + 1,), -9, **ints)
        buffers["seq_lens"] = torch.full((most,), -9, **ints)
        function(
            input_buffers=SimpleNamespace(**buffers),
            **out,
            **inputs,
            **scalars,
            sample_from_anchor=from_anchor,
        )
        return {name: tensor.tolist() for name, tensor in (out | buffers).items()}

    expected = run(cpu_kernels._STOCK["prepare"])
    assert run(speculator.prepare_dflash_inputs) == expected
    assert any(value != -9 for value in expected["query_slot_mapping"])
