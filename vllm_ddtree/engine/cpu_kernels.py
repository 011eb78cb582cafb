"""PyTorch and NumPy for vLLM functions that Triton's interpreter can't run, or runs far too slowly.

Owns the functions only; cpu_mode decides whether they are put in place. They may know vLLM's kernels but
nothing of trees. Invariant: the result is the one that vLLM's own function gives, to the last bit: seeded
draws are the same tokens, masks ban the same tokens (tests/engine/test_cpu_mode.py compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.dflash import speculator

# In a dict, since register_kernels replaces a function in every module that holds it by name.
_STOCK = {"sample": gumbel.gumbel_sample, "prepare": speculator.prepare_dflash_inputs}
# Draws of drafts use positions beyond any real one (gumbel.py, _DRAFT_NOISE_SALT).
_DRAFT_SALT = 1 << 30


def stand_ins() -> Mapping[str, Callable[..., Any]]:
    """What replaces what, by vLLM's full name of the replaced function or kernel."""
    return {
        # Fails in the interpreter: "mask has unsupported dtype".
        "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
        # Fails in the interpreter: "'int' object has no attribute 'to'".
        "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p": apply_top_k_top_p,
        # 20 s for a step of 4 trees of 33 nodes; 10 ms here.
        "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample": gumbel_sample,
        # A third of a greedy tree step.
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator.prepare_dflash_inputs": prepare_dflash_inputs,
    }


def apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, has_topp_only_rows: bool = True
) -> torch.Tensor:
    """Mask logits [rows, vocab] by top-k [rows] and top-p [rows], vLLM's PyTorch way; 0.33 adds a hint."""
    return logits if k is None and p is None else apply_top_k_top_p_pytorch(logits, k, p)


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_stride: int,
    mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Set logits [rows, vocab] to -inf where the packed mask [masks, words] has a 0 bit."""
    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    banned = bits.reshape(bitmask.shape[0], -1)[:, :vocab_size] == 0
    for mask, place in zip(banned, mapping.tolist(), strict=True):
        request, position = divmod(place, MASK_STRIDE)
        begin, end = cu_num_logits[request : request + 2].tolist()
        if position < end - begin:
            logits[begin + position].masked_fill_(mask, float("-inf"))


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: torch.Tensor | None = None,
    logits_cache_col: torch.Tensor | None = None,
    use_fp64: bool = False,
    logits_cache_source: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row by Gumbel-max, greedy rows by argmax; arguments as in vLLM's function."""
    if logits_cache is not None:
        # The kernel's store fails in the interpreter too, so it is done here for both ways below.
        source = logits if logits_cache_source is None else logits_cache_source
        real = expanded_idx_mapping >= 0
        column = logits_cache_col.expand(len(logits))[real].long()  # type: ignore[union-attr]
        logits_cache[expanded_idx_mapping[real].long(), column, : logits.shape[1]] = source[real]
    if use_fp64:
        arguments = (expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting)
        return _STOCK["sample"](logits, *arguments, use_fp64=True)
    real = expanded_idx_mapping >= 0
    rows = expanded_idx_mapping.clamp(min=0).long()
    row_temperature = torch.where(real, temperature[rows].float(), 0.0)
    drawn = row_temperature.nonzero().flatten()
    if not len(drawn):
        return logits.float().argmax(dim=-1)
    scores = logits.float().numpy(force=True).copy()
    row_seed, row_pos = seed[rows][drawn].numpy(), pos[drawn].numpy().astype(np.int64)
    if is_drafting:
        row_pos = row_pos + _DRAFT_SALT
    for row, key, place in zip(drawn.tolist(), row_seed, row_pos, strict=True):
        if apply_temperature:
            scores[row] /= row_temperature[row].numpy()
        scores[row] += _gumbel_noise(int(key), int(place), scores.shape[1])
    return torch.from_numpy(scores.argmax(axis=-1))


def prepare_dflash_inputs(
    input_buffers: Any,
    query_slot_mapping: torch.Tensor,
    context_positions: torch.Tensor,
    context_slot_mapping: torch.Tensor,
    sample_indices: torch.Tensor,
    sample_pos: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    input_batch: Any,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    input_temperature: torch.Tensor,
    input_seeds: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    parallel_drafting_token_id: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    sample_from_anchor: bool = False,
    *rest: Any,
) -> None:
    """Fill the drafter's input buffers; arguments as in vLLM's function, 0.33's number of requests last."""
    assert cp_size == 1, "a CPU has no context parallelism"
    width, steps, count = num_query_per_req, num_speculative_steps, input_batch.num_reqs
    if rest and rest[0] is not None:
        count = rest[0]
    first = 0 if sample_from_anchor else 1
    offset = torch.arange(width)

    def slots(row: int, positions: torch.Tensor) -> torch.Tensor:
        block = block_table[row, (positions // block_size).clamp(max=block_table.shape[1] - 1)].long()
        # Block 0 is vLLM's null block, which is never written.
        return torch.where(block != 0, block * block_size + positions % block_size, PAD_SLOT_ID)

    for row, state in enumerate(input_batch.idx_mapping[:count].tolist()):
        begin, end = input_batch.query_start_loc[row : row + 2].tolist()
        valid = end - int(num_rejected[row])
        positions = input_batch.positions[begin:valid].long()
        context_positions[begin:valid], context_positions[valid:end] = positions, 0
        context_slot_mapping[begin:valid] = slots(row, positions)
        context_slot_mapping[valid:end] = PAD_SLOT_ID

        last = int(input_batch.positions[valid - 1])
        query, own = slice(row * width, (row + 1) * width), last + 1 + offset
        anchor = last_sampled if num_sampled[row] > 0 else next_prefill_tokens
        input_buffers.input_ids[query] = parallel_drafting_token_id
        input_buffers.input_ids[row * width] = anchor.flatten()[state]
        input_buffers.positions[query] = own.clamp(max=max_model_len - 1)
        query_slot_mapping[query] = slots(row, own)

        # Only `steps` rows of a request are sampled from, whatever the block's width.
        sample = slice(row * steps, row * steps + width - first)
        sample_indices[sample] = (row * width + offset)[first:]
        sample_pos[sample] = own[first:] + (1 if sample_from_anchor else 0)
        sample_idx_mapping[sample] = state
        input_buffers.query_start_loc[row] = row * width
        input_buffers.seq_lens[row] = min(last + 1 + width, max_model_len)
        temperature[state], seeds[state] = input_temperature[state], input_seeds[state]

    input_buffers.query_start_loc[count : max_num_reqs + 1] = count * width
    input_buffers.seq_lens[count:max_num_reqs] = 0
    for buffer, value in ((sample_indices, 0), (sample_pos, 0), (sample_idx_mapping, -1)):
        buffer[count * steps : max_num_reqs * steps] = value
    query_slot_mapping[count * width : max_num_tokens] = PAD_SLOT_ID
    if hasattr(input_buffers, "is_padding"):  # vLLM 0.33
        input_buffers.is_padding[: count * width] = False
        for buffer, value in ((input_buffers.input_ids, 0), (input_buffers.positions, 0)):
            buffer[count * width : max_num_tokens] = value
        input_buffers.is_padding[count * width : max_num_tokens] = True


def normalize_context_k(model: Any, all_k: torch.Tensor) -> torch.Tensor:
    """RMS norm of every drafter layer's context keys [layers, tokens, heads, size] with that layer's weight.

    vLLM passes the weights of all layers to one call of its kernel, which on a CPU reads the first layer's
    for all of them (0.32.0): drafts get worse, the chain's and ours alike.
    """
    weight = model._k_norm_weights[:, None, None]
    scale = torch.rsqrt(all_k.float().pow(2).mean(-1, keepdim=True) + model._rms_norm_eps)
    return (weight * (all_k.float() * scale)).to(all_k.dtype)


def _gumbel_noise(seed: int, pos: int, vocab_size: int) -> np.ndarray:
    """vLLM's float32 noise of every token at one draw, [vocab]: murmur3 -> uniform -> Gumbel.

    The order of every float32 operation is the kernel's (gumbel.py); another order moves last bits.
    """
    h = np.zeros(vocab_size, dtype=np.uint32)
    keys = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, pos & 0xFFFFFFFF)
    for key in (*map(np.uint32, keys), np.arange(vocab_size, dtype=np.uint32)):
        h = _murmur3_mix(h, np.asarray(key).reshape(-1))
    h ^= np.uint32(16)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)

    f = np.float32
    high, low = (h >> np.uint32(16)).astype(f), (h & np.uint32(0xFFFF)).astype(f)
    u = high * f(1.52587890625e-05) + (low + f(0.5)) * f(2.3283064365386963e-10)
    series = np.full_like(u, 1.0 / 8.0)
    for term in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0):
        series = f(1.0 / term) + u * series
    series = -u * (f(1.0) + u * series)
    direct = np.log(np.maximum(f(1.0) - u, f(5.960464477539063e-08)))
    return -np.log(-np.where(u < f(0.25), series, direct))


def _murmur3_mix(h: np.ndarray, key: np.ndarray) -> np.ndarray:
    key = key * np.uint32(0xCC9E2D51)
    key = (key << np.uint32(15)) | (key >> np.uint32(17))
    h = h ^ (key * np.uint32(0x1B873593))
    h = (h << np.uint32(13)) | (h >> np.uint32(19))
    return h * np.uint32(5) + np.uint32(0xE6546B64)
