"""From ``{"method": "ddtree"}`` to vLLM's own configuration objects.

Owns the translation: what vLLM sees is ``method=dflash`` with as many speculative tokens as the tree
has nodes, our worker class, our attention backend, and the options in ``additional_config``, which is
vLLM's place for plugin data and reaches every process.
Invariant: the user's dict is not changed, so building the config twice gives the same result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig, replace
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_ddtree.drafters import find_drafter
from vllm_ddtree.engine import checks
from vllm_ddtree.engine.hooks import IS_TREE
from vllm_ddtree.options import METHOD, TreeOptions, split_options

# A child of vLLM's logger, whose handlers and level the user already chose.
logger = init_logger("vllm.ddtree")

_CONFIG_KEY = METHOD
_WORKERS = {
    "cpu": "vllm_ddtree.engine.worker_cpu.TreeCPUWorker",
    "cuda": "vllm_ddtree.engine.worker.TreeWorker",
}
# EngineArgs' field for each key that has a flag of its own.
_SHORT_FLAGS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
# vLLM's own small sizes for PIECEWISE graphs; whole-batch decode graphs need n * (nodes + 1) on top.
_PIECEWISE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_GRAPH_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def create_tree_config(
    engine_args: Any,
    target_model_config: Any,
    target_parallel_config: Any,
    original: Callable[..., Any],
) -> SpeculativeConfig:
    """Build the SpeculativeConfig of a ddtree engine and set what else must be set.

    Args:
        engine_args: vLLM's EngineArgs; worker class, attention backend, graph sizes and additional
            config are set on it.
        target_model_config: the target's ModelConfig.
        target_parallel_config: the ParallelConfig; its ``worker_cls`` is set.
        original: vLLM's unpatched ``EngineArgs.create_speculative_config``.

    Raises:
        ValueError: every problem found, in one message.
    """
    before = {name: getattr(engine_args, name) for name in ("speculative_config", *_SHORT_FLAGS)}
    try:
        options, rest = split_options(_with_short_flags(engine_args))
    except ValueError as error:
        raise checks.refusal([str(error)]) from None
    problems = checks.platform_problems()
    problems += checks.target_problems(target_model_config)
    problems += checks.parallel_problems(engine_args, target_parallel_config)
    problems += checks.speculative_problems(rest)
    if not rest.get("model"):
        row = find_drafter(target_model_config.model)
        if row is None:
            problems.append(checks.no_drafter(target_model_config.model))
        else:
            rest["model"] = row.drafter
    load_format = str(engine_args.load_format)
    problems += checks.weight_problems("target", target_model_config.model, load_format)
    if rest.get("model"):
        problems += checks.drafter_problems(rest["model"], rest.get("revision"), target_model_config)
        problems += checks.weight_problems("drafter", rest["model"], load_format)
        problems += checks.drafter_file_problems(rest["model"])
    if problems:
        raise checks.refusal(problems)

    if current_platform.is_cuda():
        # The same backend as the target's, so that a step builds attention metadata once. In the drafter's
        # layers it is vLLM's FlashAttention.
        rest.setdefault("attention_backend", "CUSTOM")
    rest.update(method="dflash", num_speculative_tokens=options.num_nodes)
    vars(engine_args).update(dict.fromkeys(_SHORT_FLAGS) | {"speculative_config": rest})
    try:
        config = original(engine_args, target_model_config, target_parallel_config)
    finally:
        vars(engine_args).update(before)
    setattr(config, IS_TREE, True)
    if config.draft_load_config is None and load_format in ("auto", "hf"):
        # A drafter by model id can't be looked into above; vLLM would fall back to pickles.
        config.draft_load_config = replace(engine_args.create_load_config(), load_format="safetensors")
    horizon = drafter_horizon(config)
    options = options.model_copy(update={"max_depth": min(options.max_depth or horizon, horizon)})

    _set_worker(engine_args, target_parallel_config)
    engine_args.additional_config = {
        **(engine_args.additional_config or {}),
        _CONFIG_KEY: options.model_dump(),
    }
    if current_platform.is_cuda():
        engine_args.attention_config = copy.copy(engine_args.attention_config)
        engine_args.attention_config.backend = AttentionBackendEnum.CUSTOM
        tiers = config.num_speculative_tokens_per_batch_size
        _set_graph_sizes(engine_args, target_model_config.max_model_len, options.num_nodes, tiers)
    return config


def _with_short_flags(engine_args: Any) -> dict[str, Any]:
    """The user's speculative config with vLLM's short flags in it; ValueError where both say one thing."""
    found = {key.replace("-", "_"): value for key, value in (engine_args.speculative_config or {}).items()}
    for name, key in _SHORT_FLAGS.items():
        value = getattr(engine_args, name)
        if value is not None and key in found:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} {value} and {key} = {found[key]!r} in the speculative config: leave one out."
            )
        if value is not None:
            found[key] = value
    return found


def tree_options(vllm_config: VllmConfig) -> TreeOptions | None:
    """Return the options stored in a VllmConfig, or None for an engine without ddtree."""
    stored = (vllm_config.additional_config or {}).get(_CONFIG_KEY)
    return None if stored is None else TreeOptions(**stored)


def drafter_horizon(config: SpeculativeConfig) -> int:
    """Tokens that one drafter forward predicts: block size less the anchor (Chen et al., 2602.06036)."""
    return int(config.draft_model_config.hf_config.block_size) - 1


def verification_rows(vllm_config: VllmConfig) -> int:
    """Most rows of logits that one step can have: the widest batch of trees that the token budget admits."""
    return min(max(_rows_by_batch(vllm_config)), vllm_config.scheduler_config.max_num_batched_tokens)


def _rows_by_batch(vllm_config: VllmConfig) -> list[int]:
    """Rows of a batch in which every request verifies a tree, by the number of requests (0 for none)."""
    spec, seqs = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    nodes = [spec.num_speculative_tokens] * (seqs + 1)
    if spec.num_speculative_tokens_per_batch_size:
        nodes = build_dynamic_sd_schedule_lookup(
            spec.num_speculative_tokens_per_batch_size, seqs, spec.num_speculative_tokens
        )
    return [count * (nodes[count] + 1) for count in range(seqs + 1)]


def check_engine_config(vllm_config: VllmConfig) -> None:
    """Check what is only known after vLLM has resolved every default; log the start-up block."""
    options = tree_options(vllm_config)
    assert options is not None
    problems = checks.resolved_problems(vllm_config, options)
    if problems:
        raise checks.refusal(problems)
    config, rows = vllm_config.speculative_config, _rows_by_batch(vllm_config)
    slots, budget = config.max_num_new_slots_for_drafting, vllm_config.scheduler_config.max_num_batched_tokens
    logger.info(
        "ddtree: drafter %s, horizon %d, nodes per request %s, depth <= %d; up to %d requests in a step. "
        "Read the accepted length, not the acceptance rate: most nodes are alternatives.",
        config.draft_model_config.model,
        drafter_horizon(config),
        _schedule(rows),
        options.max_depth,
        max(count for count, needed in enumerate(rows) if needed + count * slots <= budget),
    )


def _schedule(rows: list[int]) -> str:
    """Nodes by batch size in words, such as "64 (1-2 requests), 32 (3-8)"."""
    nodes = [needed // count - 1 for count, needed in enumerate(rows) if count]
    parts, first = [], 1
    for count, here in enumerate(nodes, start=1):
        if count == len(nodes) or nodes[count] != here:
            parts.append(f"{here} ({first}-{count} requests)" if count > first else f"{here} ({count})")
            first = count + 1
    return ", ".join(parts)


def _set_worker(engine_args: Any, parallel_config: Any) -> None:
    ours = _WORKERS["cpu" if current_platform.is_cpu() else "cuda"]
    if parallel_config.worker_cls not in ("auto", ours):
        raise checks.refusal([checks.foreign_worker(parallel_config.worker_cls)])
    parallel_config.worker_cls = ours


def _set_graph_sizes(
    engine_args: Any,
    max_model_len: int,
    num_nodes: int,
    tiers: list[tuple[int, int, int]] | None = None,
) -> None:
    """Cover whole batches of width nodes + 1 with FULL graphs, unless the user chose sizes.

    Sizes that no batch reaches are left out: to capture one, vLLM makes up requests longer than the model's.
    tiers: (first batch size, last, nodes), vLLM's num_speculative_tokens_per_batch_size. A batch has its own
    tier's nodes or, while it shrinks, fewer: each width is covered up to the end of its tier.
    """
    compilation = copy.deepcopy(engine_args.compilation_config)
    chosen = compilation.cudagraph_capture_sizes or engine_args.cudagraph_capture_sizes
    if chosen is not None:
        return
    seqs = engine_args.max_num_seqs or _GRAPH_BATCHES[-1]
    tiers = tiers or [(1, seqs, num_nodes)]
    last = max(first for first, _, _ in tiers)  # which vLLM carries on to every larger batch
    whole = {
        n * (min(nodes, num_nodes) + 1)
        for first, end, nodes in tiers
        for n in _GRAPH_BATCHES
        if n <= seqs and (n <= end or first == last)
    }
    sizes = {*_PIECEWISE_SIZES, *whole}
    compilation.cudagraph_capture_sizes = sorted(size for size in sizes if size <= seqs * max_model_len)
    engine_args.compilation_config = compilation
