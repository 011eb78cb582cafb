"""Run a real engine in this process and take what it says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 640,
    "disable_log_stats": False,
    "seed": 0,
}
GPU = bool(os.environ.get("DDTREE_TEST_GPU"))
if GPU:  # many engines on one device; the utilization is then only checked against what is free
    SETTINGS |= {"kv_cache_memory_bytes": 2**26, "gpu_memory_utilization": 0.02}


@contextlib.contextmanager
def engine(pair: tuple[str, str], speculative: dict[str, Any] | None = None, **changes: Any) -> Iterator[LLM]:
    """An LLM on ``pair``'s target; ``speculative`` without a model drafts with the pair's drafter."""
    target, drafter = pair
    if speculative is not None:
        speculative = {"model": drafter, **speculative}
    llm = LLM(target, speculative_config=speculative, **(SETTINGS | changes))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def engines(pair: tuple[str, str], speculative: dict[str, Any], **changes: Any) -> Iterator[tuple[LLM, LLM]]:
    """Two engines on one target, alive together: without speculation, and with it."""
    with engine(pair, **changes) as plain, engine(pair, speculative, **changes) as ours:
        yield plain, ours


def runner(llm: LLM) -> Any:
    """The model runner inside an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def tree(nodes: int, **options: Any) -> dict[str, Any]:
    """The speculative config of a tree of ``nodes`` nodes."""
    return {"method": "ddtree", "num_speculative_tokens": nodes, **options}


def greedy(tokens: int, **changes: Any) -> SamplingParams:
    """Greedy sampling of exactly ``tokens`` tokens."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | changes))


def generate(llm: LLM, prompts: list[Any], params: Any) -> list[list[int]]:
    """Token ids of every completion, in order of prompts and then of choices."""
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def counters(llm: LLM) -> dict[str, float]:
    """Those of vLLM's metrics that are one number, by name."""
    return {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}


def accepted_length(llm: LLM) -> float:
    """Mean tokens per verification step since the engine started, the bonus counted."""
    values = counters(llm)
    drafts = values["vllm:spec_decode_num_drafts"]
    return 1 + values["vllm:spec_decode_num_accepted_tokens"] / drafts


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of bytes, of ragged lengths 3..40, reproducible."""
    import random

    draw = random.Random(seed)
    return [[draw.randrange(32, 127) for _ in range(draw.randint(3, 40))] for _ in range(count)]
