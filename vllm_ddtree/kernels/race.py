"""Gumbel noise on every token of every row, in one launch, keyed by (seed, position, token).

Owns the launch and the kernel; `residual.race_keys` composes the same from torch and defines it.
Invariant: nothing depends on the batch, so one key always has one noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _mix(word):
    # SplitMix64's finaliser on unsigned words, as in coins.py.
    word += 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _race_kernel(
    logps_ptr,  # [R, V] float32, becomes the keys
    bases_ptr,  # [R] int64, hash of seed and position
    drawn_ptr,  # [R] bool
    rows_ptr,  # [R] int64, row of probs
    probs_ptr,  # [rows, V] float32
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    at = logps_ptr + row * vocab + token
    logps = tl.load(at, mask=inside, other=float("-inf"))
    tl.store(probs_ptr + tl.load(rows_ptr + row) * vocab + token, tl.exp(logps), mask=inside)
    if tl.load(drawn_ptr + row):
        word = _mix(tl.load(bases_ptr + row).to(tl.uint64) + token.to(tl.uint64))
        u = tl.minimum(
            ((word >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08
        )
        # Small ones win the race, so -log(1 - u) must be exact there: the first terms of its series.
        wait = tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * 0.3333333333333333)), -tl.log(1.0 - u))
        tl.store(at, logps - tl.log(wait), mask=inside)


def race(
    logps: torch.Tensor, bases: torch.Tensor, drawn: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor
) -> None:
    """In place: logps [R, V] float32 become keys, and row `rows[i]` of probs [rows, V] becomes exp(logps[i]).

    bases int64 [R], the hash of seed and position; drawn bool [R], rows without it keep logps as keys.
    """
    vocab = logps.shape[1]
    grid = (logps.shape[0], triton.cdiv(vocab, _BLOCK))
    _race_kernel[grid](logps, bases, drawn, rows, probs, vocab, BLOCK=_BLOCK)
