"""From ``{"method": "ddtree"}`` to vLLM's own configuration objects.

Owns the translation: what vLLM sees is ``method=dflash`` with as many speculative tokens as the tree
has nodes, our worker class, our attention backend, and the options in ``additional_config``, which is
vLLM's place for plugin data and reaches every process.
Invariant: the user's dict is not changed, so building the config twice gives the same result.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig, replace
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_ddtree.drafters import block_size, find_drafter
from vllm_ddtree.engine import checks, graphs, rotary
from vllm_ddtree.engine.hooks import IS_TREE
from vllm_ddtree.options import METHOD, TreeOptions, plain_keys, split_options
from vllm_ddtree.sizes import StepSizes

# A child of vLLM's logger, whose handlers and level the user already chose.
logger = init_logger("vllm.ddtree")

_CONFIG_KEY = METHOD
_WORKERS = {
    "cpu": "vllm_ddtree.engine.worker_cpu.TreeCPUWorker",
    "cuda": "vllm_ddtree.engine.worker.TreeWorker",
}
# EngineArgs' field for each key that has a flag of its own.
_SHORT_FLAGS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


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
    # vLLM drops schedules under data parallelism, where ranks would draft differently.
    scheduled = target_parallel_config.data_parallel_size == 1
    before = {name: getattr(engine_args, name) for name in ("speculative_config", *_SHORT_FLAGS)}
    try:
        options, rest = split_options(_with_short_flags(engine_args), scheduled)
    except ValueError as error:
        raise checks.refusal([str(error)]) from None
    problems = checks.platform_problems()
    problems += checks.target_problems(target_model_config)
    problems += checks.parallel_problems(engine_args, target_parallel_config)
    problems += checks.speculative_problems(rest)
    problems += checks.additional_config_problems(engine_args.additional_config)
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
    # vLLM 0.32 leaves the last block of a prefix hit out for every drafter that reads hidden states. DFlash's
    # rows come from the hidden state at their own position, so all of them are whole (0.33 leaves none out).
    rest.setdefault("disable_eagle_block_drop", True)
    rest.update(method="dflash", num_speculative_tokens=options.num_nodes)
    vars(engine_args).update(dict.fromkeys(_SHORT_FLAGS) | {"speculative_config": rest})
    try:
        config = original(engine_args, target_model_config, target_parallel_config)
    finally:
        vars(engine_args).update(before)
    problem = rotary.stretch(config.draft_model_config.hf_config, target_model_config.max_model_len)
    if problem:
        raise checks.refusal([problem])
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
        seqs = min(engine_args.max_num_seqs or graphs.MOST_REQUESTS, graphs.MOST_REQUESTS)
        nodes = nodes_by_batch(config, seqs, scheduled)
        graphs.set_sizes(engine_args, nodes, horizon, target_model_config.max_model_len)
    return config


def _with_short_flags(engine_args: Any) -> dict[str, Any]:
    """The user's speculative config with vLLM's short flags in it; ValueError where both say one thing."""
    found = plain_keys(engine_args.speculative_config or {})
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
    return int(block_size(config.draft_model_config.hf_config.to_dict())) - 1


def nodes_by_batch(config: SpeculativeConfig, seqs: int, scheduled: bool = True) -> list[int]:
    """Nodes of each request by the number of requests in the step before, up to ``seqs`` (0 for none).

    ``scheduled``: False where the config holds a schedule that vLLM is about to drop.
    """
    most, schedule = config.num_speculative_tokens, config.num_speculative_tokens_per_batch_size
    if not (scheduled and schedule):
        return [0] + [most] * seqs
    return build_dynamic_sd_schedule_lookup(schedule, seqs, most)


def step_sizes(vllm_config: VllmConfig) -> StepSizes:
    """The sizes of a ddtree engine's steps, from its resolved config."""
    config, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    horizon = drafter_horizon(config)
    options = tree_options(vllm_config)
    return StepSizes(
        nodes=tuple(nodes_by_batch(config, scheduler.max_num_seqs)),
        horizon=horizon,
        max_depth=(options and options.max_depth) or horizon,
        batched_tokens=scheduler.max_num_batched_tokens,
        scheduled_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
    )


def check_engine_config(vllm_config: VllmConfig) -> None:
    """Check what is only known after vLLM has resolved every default; log the start-up block."""
    options = tree_options(vllm_config)
    assert options is not None
    sizes = step_sizes(vllm_config)
    problems = checks.resolved_problems(vllm_config, options, sizes)
    if problems:
        raise checks.refusal(problems)
    logger.info(
        "ddtree: drafter %s, horizon %d, nodes per request %s, depth <= %d; up to %d requests in a step. "
        "Read the accepted length, not the acceptance rate: most nodes are alternatives.",
        vllm_config.speculative_config.draft_model_config.model,
        sizes.horizon,
        _schedule(list(sizes.nodes[1:])),
        options.max_depth,
        sizes.requests_at_once,
    )
    if sizes.requests_at_once < sizes.max_num_seqs:
        logger.warning(
            "ddtree: the trees of %d requests fit into a step of %d tokens; of max_num_seqs = %d the others "
            "wait for one of them to end. For all at once set max_num_batched_tokens to at least %d, or take "
            "fewer nodes.",
            sizes.requests_at_once,
            sizes.scheduled_tokens,
            sizes.max_num_seqs,
            sizes.tokens_for_all,
        )


def _schedule(nodes: list[int]) -> str:
    """Nodes by batch size from 1 in words, such as "64 (1-2 requests), 32 (3-8 requests)"."""
    parts, first = [], 1
    for here, group in itertools.groupby(nodes):
        last = first + len(list(group)) - 1
        parts.append(f"{here} ({first}-{last} requests)" if last > first else f"{here} ({first})")
        first = last + 1
    return ", ".join(parts)


def _set_worker(engine_args: Any, parallel_config: Any) -> None:
    ours = _WORKERS["cpu" if current_platform.is_cpu() else "cuda"]
    if parallel_config.worker_cls not in ("auto", ours):
        raise checks.refusal([checks.foreign_worker(parallel_config.worker_cls)])
    parallel_config.worker_cls = ours
