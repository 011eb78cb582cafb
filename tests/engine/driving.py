"""Step an in-process engine by hand and look at what its scheduler and its caches hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engines import runner
from vllm import LLM, SamplingParams

from vllm_ddtree.engine.layout import cache_rows
from vllm_ddtree.status import vllm_version

# vLLM 0.32 computes the last block of a prefix hit again for drafters that read hidden states, unless told
# not to, as ddtree does. 0.33 does not for DFlash, may cache a block once the token behind it is known, and
# takes accepted tokens that lie after a stop out of the count of computed ones.
VLLM_0_32 = vllm_version()[1].startswith("0.32")


def scheduler(llm: LLM) -> Any:
    """The scheduler of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def drive(
    llm: LLM,
    requests: dict[str, tuple[list[int], SamplingParams]],
    after_step: Callable[[int], Any] | None = None,
) -> dict[str, Any]:
    """Add all requests, step until none is left; the last output of each by name."""
    for name, (prompt, params) in requests.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    last, step = {}, 0
    while llm.llm_engine.has_unfinished_requests():
        last |= {output.request_id: output for output in llm.llm_engine.step()}
        step += 1
        if after_step is not None:
            after_step(step)
    return last


def named(request_id: str) -> str:
    """The name a request was added under; vLLM appends a random suffix to it."""
    return request_id.split("-")[0]


def free_blocks(llm: LLM) -> tuple[int, int]:
    """(free, all) KV blocks; the null block counts in neither."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1


def watch_widths(llm: LLM) -> dict[int, set[int]]:
    """Drafts per request by number of requests, filled from now on as the engine steps."""
    widths: dict[int, set[int]] = {}
    prepare = runner(llm).prepare_attn

    def watched(batch: Any) -> Any:
        if batch.num_draft_tokens:
            widths.setdefault(batch.num_reqs, set()).add(batch.num_draft_tokens // batch.num_reqs)
        return prepare(batch)

    runner(llm).prepare_attn = watched
    return widths


def target_rows(llm: LLM, blocks: list[int], count: int) -> dict[str, torch.Tensor]:
    """The first ``count`` cache rows behind a block table, in every layer of the target: [count, heads, K|V].

    On the CPU. Only for engines with ddtree, whose CPU cache rows lie as they are.
    """
    work = runner(llm)
    drafter = work.speculator.draft_attn_layer_names
    found = {}
    for name, layer in work.compilation_config.static_forward_context.items():
        if name in drafter or not hasattr(layer, "kv_cache"):
            continue
        rows = cache_rows(layer)
        token = torch.arange(count)
        found[name] = rows[torch.tensor(blocks)[token // rows.shape[1]], token % rows.shape[1]].cpu()
    return found
