"""Which requests are verified as a chain, and why.

A chain is the tree whose every node has one child: vLLM's own row-by-row processing is then right as it
is. Owns the list of sampling parameters whose effect at a node depends on the path to it.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_ddtree.engine.grammar import TREE_BACKENDS

_STOCK_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)


def has_custom_processors(sampler: Any) -> bool:
    """Whether vLLM's Sampler runs processors that are not its own, from the config or an installed plugin."""
    return any(not isinstance(processor, _STOCK_PROCESSORS) for processor in sampler.logits_processors)


def grammar_reason(params: SamplingParams, chains: bool, reasoning: bool) -> str | None:
    """Return what makes a structured request a chain, or None.

    Args:
        chains: ``ddtree_grammar`` says so.
        reasoning: the engine has a reasoning parser, so a grammar begins in the middle of a draft.
    """
    if params.structured_outputs is None:
        return None
    backend = params.structured_outputs._backend
    rules = (
        (chains, "structured output, as ddtree_grammar says"),
        (reasoning, "structured output behind a reasoning parser"),
        (backend not in TREE_BACKENDS, f"structured output by {backend}"),
    )
    return next((name for applies, name in rules if applies), None)


def chain_reason(
    params: SamplingParams | None,
    custom_processors: bool,
    grammar_chains: bool = False,
    reasoning: bool = False,
) -> str | None:
    """Return what makes this request a chain, in words for the log, or None for a tree.

    Args:
        params: the request's sampling parameters.
        custom_processors: whether the engine runs logits processors that ddtree knows nothing about.
        grammar_chains, reasoning: see :func:`grammar_reason`.
    """
    if params is None:
        return None
    rules = (
        (params.repetition_penalty != 1.0, "a repetition penalty"),
        (params.frequency_penalty != 0.0, "a frequency penalty"),
        (params.presence_penalty != 0.0, "a presence penalty"),
        (bool(params.bad_words), "bad_words"),
        (getattr(params, "thinking_token_budget", None) is not None, "a thinking budget"),
        (custom_processors, "custom logits processors"),
    )
    found = next((name for applies, name in rules if applies), None)
    return found or grammar_reason(params, grammar_chains, reasoning)
