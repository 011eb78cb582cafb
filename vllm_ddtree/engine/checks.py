"""Everything that stops an engine from starting with ddtree, one sentence each.

Owns the rules and their wording: requirement, what was found, why, what to do. It builds nothing.
Invariant: each function returns all problems it finds, so that the user sees them at once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm import envs
from vllm.platforms import current_platform

from vllm_ddtree import ops
from vllm_ddtree.drafters import block_size
from vllm_ddtree.options import TreeOptions
from vllm_ddtree.sizes import StepSizes

_CONNECTOR = (
    "a KV connector or KV offloading",
    "it saves the cache inside the forward, before the accepted path is moved into place",
)
# Architectures that vLLM serves with another speculator class than DFlashSpeculator.
_OTHER_SPECULATORS = ("DFlash2DraftModel", "LiLiCorrDraftModel", "XPressDraftModel")


def refusal(problems: list[str]) -> ValueError:
    """Return the one error that lists every problem."""
    return ValueError("ddtree can't start:\n- " + "\n- ".join(problems))


def no_drafter(target: str) -> str:
    """The sentence for a target that has no row in the drafter table."""
    return (
        f"no public DFlash drafter is known for {target!r}. ddtree drafts with a DFlash model trained "
        'for the target; name one with "model" in the speculative config.'
    )


def foreign_worker(found: str) -> str:
    """The sentence for an engine whose worker class is already taken."""
    return (
        f"ddtree needs its own worker class, but --worker-cls is {found!r}. Only one of them can run "
        "the model; leave --worker-cls out or don't ask for ddtree."
    )


def platform_problems() -> list[str]:
    """Problems of the platform and the runner version that are known before any config is built."""
    problems = []
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        problems.append(
            f"ddtree runs on NVIDIA GPUs and, for tests, on CPUs; this is {current_platform.device_type!r}."
        )
    if current_platform.is_cpu():
        from vllm_ddtree.engine.cpu_mode import cpu_mode_problem

        problem = cpu_mode_problem()
        if problem:
            problems.append(problem)
    elif envs.VLLM_USE_V2_MODEL_RUNNER is False:
        problems.append(_needs_v2("VLLM_USE_V2_MODEL_RUNNER=0 is set"))
    if current_platform.is_cuda():
        problems += _gpu_problems()
    if envs.VLLM_BATCH_INVARIANT:
        problems.append(
            "VLLM_BATCH_INVARIANT=1 promises results that no batch changes, but a tree's rows round as its "
            "width and the requests beside it make them. Unset it, or serve without speculation."
        )
    return problems


def _gpu_problems() -> list[str]:
    """Kernels that are missing, or that this GPU can't run."""
    problems = []
    missing = ops.kernels_error("cuda")
    if missing:
        problems.append(
            "on a GPU, ddtree needs its compiled CUDA kernels, because the reference path waits for the "
            f"device, which no CUDA graph can hold: {missing}."
        )
    capability = current_platform.get_device_capability()
    if capability is not None and capability < (8, 0):
        problems.append(
            "ddtree needs a GPU of compute capability 8.0 (Ampere) or newer, found "
            f"{capability.as_version_str()}: its kernels use what older ones lack. Serve without ddtree."
        )
    return problems


def target_problems(model: Any) -> list[str]:
    """Problems of the target, from its ModelConfig."""
    text = model.hf_text_config
    problems = []
    layer_types = set(getattr(text, "layer_types", None) or ())
    if model.runner_type != "generate":
        problems.append(f"ddtree needs a generating model; {model.model!r} runs as {model.runner_type!r}.")
    if model.is_encoder_decoder:
        problems.append(
            "the target is an encoder-decoder model; tree positions are only defined for decoder-only "
            "models. Serve it without ddtree."
        )
    if model.use_mla:
        problems.append(
            "the target uses multi-head latent attention (MLA), whose cache rows ddtree can't verify as a "
            "tree yet. Serve it with method dflash."
        )
    if model.is_hybrid or model.is_attention_free or "linear_attention" in layer_types:
        problems.append(
            "the target has recurrent layers (GDN/Mamba): their state follows one path only, not a tree. "
            "Serve it with method dflash."
        )
    if "sliding_attention" in layer_types or "chunked_attention" in layer_types or _has_window(model):
        problems.append(
            "the target has sliding-window or chunked attention: windows count rows, and a tree's rows are "
            "not positions. Serve it with method dflash."
        )
    if model.is_multimodal_model:
        problems.append(
            "the target is multimodal: ddtree does not carry its three-axis positions yet. Serve it with "
            "method dflash."
        )
    if model.enable_trace_replay or model.return_sampling_mask:
        problems.append("trace replay and sampling masks read rows in chain order and can't run with ddtree.")
    return problems


def _has_window(model: Any) -> bool:
    uses = getattr(model.hf_text_config, "use_sliding_window", True)
    return bool(uses) and model.get_sliding_window() is not None


def parallel_problems(engine_args: Any, parallel: Any) -> list[str]:
    """Problems of the parallel layout and of features that read the KV cache before the commit."""
    rules = (
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "trees live on the last stage only"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism", "tree rows are not split"),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism",
            "tree rows are not split",
        ),
        (
            getattr(parallel, "enable_batch_sharded_sampling", False),
            "batch-sharded sampling",
            "the tree walk needs all of a request's rows on one rank",
        ),
        (getattr(parallel, "use_ubatching", False), "dual batch overlap", "trees are built per whole batch"),
        (
            engine_args.kv_transfer_config is not None
            or getattr(engine_args, "kv_offloading_size", None) is not None,
            *_CONNECTOR,
        ),
        (
            getattr(engine_args, "watermark_config", None) is not None,
            "watermarking",
            "its contexts are rows in chain order",
        ),
        (
            engine_args.aux_output_config.enable_return_routed_experts,
            "returned routed experts",
            "they are kept by cache slot, and the rows of an accepted path move",
        ),
    )
    return [_incompatible(name, why) for bad, name, why in rules if bad]


def _incompatible(name: str, why: str) -> str:
    return f"ddtree can't run with {name}: {why}. Switch it off."


def additional_config_problems(additional: Any) -> list[str]:
    """Problems of the place in which ddtree's options reach the workers."""
    if not additional or isinstance(additional, dict):
        return []
    return [
        f"additional_config is a {type(additional).__name__}, but it must be a dict: ddtree's options travel "
        "to the workers in it. Give a dict or leave it out."
    ]


def request_problem(params: Any) -> str | None:
    """What ddtree can't do for one request, from its SamplingParams, or None."""
    if params.logprob_token_ids:
        return (
            "logprob_token_ids needs the scores of given tokens at every row, but vLLM's verification with "
            "any speculation keeps the top ones only and would leave them out. Ask for logprobs=N "
            "(-1 for all), or serve without ddtree."
        )
    return None


def speculative_problems(rest: dict[str, Any]) -> list[str]:
    """Problems among vLLM's own speculative keys that name another verification rule."""
    rules = {
        "draft_sample_method": ("greedy", None),
        "rejection_sample_method": ("standard", None),
        "enable_adaptive_verification": (False, None),
        "use_local_argmax_reduction": (False, None),
        "disable_padded_drafter_batch": (False, None),
    }
    return [
        f"{key} = {rest[key]!r} names another way to draft or verify; ddtree has its own. Leave it out."
        for key, allowed in rules.items()
        if key in rest and rest[key] not in allowed
    ]


def drafter_problems(drafter: str, revision: str | None, target: Any) -> list[str]:
    """Problems of the drafter's config.json against the target's."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(drafter, revision=revision)
    except Exception as error:
        return [f"the drafter {drafter!r} can't be read: {type(error).__name__}: {error}"]
    if not config:
        return [
            f"the drafter {drafter!r} has no config.json; a DFlash drafter's folder or model id is needed."
        ]
    architectures = config.get("architectures") or []
    if any(name in _OTHER_SPECULATORS for name in architectures):
        return [
            f"the drafter {drafter!r} is {architectures}, which vLLM drafts with another class; ddtree "
            "builds trees from plain DFlash drafters (DFlashDraftModel) only."
        ]
    if "dflash_config" not in config or not any("DFlash" in name for name in architectures):
        return [
            f"the drafter {drafter!r} is not a DFlash model: architectures {architectures}, "
            f"{'no ' if 'dflash_config' not in config else ''}dflash_config. ddtree needs independent "
            "distributions for a whole block from one forward, which only DFlash gives."
        ]
    return _fit_problems(config, target.hf_text_config, drafter)


def weight_problems(role: str, model: str, load_format: str) -> list[str]:
    """Problems of a model's weight files: only safetensors are read, never a pickle.

    Args:
        role: "target" or "drafter", for the sentence.
        model: folder or model id; an id can't be looked into here.
        load_format: vLLM's key, under which ``auto`` falls back to pickles.
    """
    files = list(Path(model).glob("*.safetensors"))
    if load_format in ("pt", "npcache"):
        found = f"load_format is {load_format!r}"
    elif load_format in ("auto", "hf") and Path(model).is_dir() and not files:
        found = "its folder has no *.safetensors file"
    else:
        return []
    return [
        f"the {role} {model!r} would be read from pickles: {found}. A pickle can run code, so ddtree takes "
        "safetensors only; convert the weights."
    ]


def drafter_file_problems(drafter: str) -> list[str]:
    """Problems of a local drafter's weight files, from their headers alone.

    vLLM leaves parameters that no file has as they were allocated, without a word, and the drafter would
    draft nonsense: every layer must have what any layer has.
    """
    folder, names = Path(drafter), set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        except Exception as error:
            return [f"the drafter's file {str(file)!r} is broken ({error}). Copy it again."]
    found = [
        match.groups() for match in (re.search(r"layers\.(\d+)\.(.+)$", name) for name in names) if match
    ]
    if not found:
        return []
    try:
        layers = range(int(json.loads((folder / "config.json").read_text())["num_hidden_layers"]))
    except (OSError, ValueError, KeyError):
        return []  # said elsewhere
    parts = {part for _, part in found}
    missing = sorted(f"layers.{i}.{part}" for i in layers for part in parts if (str(i), part) not in found)
    if not missing:
        return []
    return [
        f"the drafter {drafter!r} lacks {len(missing)} tensors, {missing[0]!r} for one; it would draft from "
        "memory as it was allocated. Copy all of its files."
    ]


def _fit_problems(config: dict[str, Any], text: Any, drafter: str) -> list[str]:
    dflash = config["dflash_config"]
    layers = dflash.get("target_layer_ids") or []
    num_layers = text.num_hidden_layers
    vocab = config.get("vocab_size")
    mask = dflash.get("mask_token_id")
    block = block_size(config)
    problems = []
    if not isinstance(block, int) or block < 2:
        problems.append(f"block_size is {block!r}; it must be at least 2, the anchor and one drafted token.")
    if vocab != text.vocab_size:
        problems.append(
            f"its vocabulary has {vocab} tokens, the target's {text.vocab_size}: the drafter shares the "
            "target's embedding and head, so they must be equal."
        )
    if config.get("hidden_size") != text.hidden_size:
        problems.append(
            f"its hidden size is {config.get('hidden_size')}, the target's {text.hidden_size}: it reads the "
            "target's hidden states, so they must be equal."
        )
    if not layers or any(not 0 <= layer < num_layers for layer in layers):
        problems.append(f"target_layer_ids {layers} don't fit the target's {num_layers} layers.")
    expected = config.get("num_target_layers")
    if expected is not None and expected != num_layers:
        problems.append(f"it was trained for a target of {expected} layers, this one has {num_layers}.")
    if not isinstance(mask, int) or not 0 <= mask < text.vocab_size:
        problems.append(f"mask_token_id {mask!r} is not a token of the target.")
    if dflash.get("sample_from_anchor"):
        problems.append("sample_from_anchor is set, which is DSpark's layout, not DFlash's.")
    return [f"the drafter {drafter!r} doesn't fit the target: {line}" for line in problems]


def resolved_problems(vllm_config: Any, options: TreeOptions, sizes: StepSizes) -> list[str]:
    """Problems that need vLLM's resolved defaults: runner version, token budget, model length."""
    problems = []
    width = options.num_nodes + 1
    if not vllm_config.use_v2_model_runner:
        problems.append(_needs_v2("vLLM chose the V1 model runner for this configuration"))
    if vllm_config.kv_transfer_config is not None:  # also filled in by vLLM itself, from other options
        problems.append(_incompatible(*_CONNECTOR))
    if sizes.batched_tokens < width:
        problems.append(
            f"{options.num_nodes} nodes need max_num_batched_tokens >= {width}, the rows of one tree in a "
            f"step, found {sizes.batched_tokens}. Raise it or take fewer."
        )
    else:
        problems += _step_limit_problems(vllm_config.scheduler_config, options.num_nodes)
    if width >= vllm_config.model_config.max_model_len:
        problems.append(
            f"{options.num_nodes} nodes don't fit max_model_len {vllm_config.model_config.max_model_len}: "
            "a step needs one cache slot per node. Take fewer nodes."
        )
    problems += cache_dtype_problems(
        {
            "the": vllm_config.cache_config.cache_dtype,
            "the drafter's": vllm_config.speculative_config.kv_cache_dtype or "auto",
        },
        vllm_config.model_config.dtype,
        current_platform.is_cuda(),
    )
    if current_platform.is_cuda():
        problems += attention_problems(vllm_config, options)
    if vllm_config.structured_outputs_config.backend == "lm-format-enforcer":
        problems.append(
            "the structured output backend lm-format-enforcer can't roll a draft back, so vLLM refuses every "
            "structured request with any speculation. Use xgrammar, guidance or outlines."
        )
    return problems


def attention_problems(vllm_config: Any, options: TreeOptions) -> list[str]:
    """Problems of the FlashAttention version that vLLM takes on this GPU for the target's heads."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, uses_fa4_hd256_kernel

    model = vllm_config.model_config
    size = model.get_head_size()
    if (
        options.attention_backend == "fused"
        or model.dtype == torch.float32
        or not uses_fa4_hd256_kernel(size)
    ):
        return []
    with set_current_vllm_config(vllm_config):
        if get_flash_attn_version(head_size=size, supports_fa4_hd256=True) != 4:
            return []
    return [
        f"the target has heads of {size}, for which vLLM takes FlashAttention 4's own kernel on this GPU: it "
        "wants lengths and block tables in whole pages of 128, which a tree's context does not have. Set "
        '"ddtree_attention_backend": "fused", or --attention-config.flash_attn_version 2.'
    ]


def cache_dtype_problems(kinds: dict[str, str], model: torch.dtype, cuda: bool) -> list[str]:
    """Problems of the KV caches' types, a list of what is known to work: vLLM adds types with every version.

    Args:
        kinds: vLLM's name of the type by whose cache it is, such as "the drafter's".
        model: the model's own type, which ``auto`` takes.
        cuda: on an NVIDIA GPU; there vLLM itself checks whether FlashAttention reads fp8 on this one.
    """
    own = str(model).removeprefix("torch.")
    known = ["auto"] if own == "float32" else ["auto", own]
    if not cuda:
        known += ["fp8", "fp8_e4m3", "fp8_e5m2"]
    elif own != "float32":
        known += ["fp8", "fp8_e4m3"]
    return [
        f"{whose} KV cache dtype is {kind!r}, which ddtree's attention can't read for a model in {own}: it "
        f"would take the bytes for another type, or not find a row's scales. Use one of {known}."
        for whose, kind in kinds.items()
        if kind not in known
    ]


def _step_limit_problems(scheduler: Any, nodes: int) -> list[str]:
    """Limits on the tokens of one request in a step; vLLM takes 0 and None for no limit."""
    limits = {
        name: getattr(scheduler, name)
        for name in ("long_prefill_token_threshold", "max_num_scheduled_tokens")
    }
    return [
        f"{name} is {limit}, but a tree of {nodes} nodes is {nodes + 1} tokens of one request: vLLM would "
        "cut the tree, and stop or starve requests that join, which it pads to that width. "
        f"Set it to {nodes + 1} or more, or take fewer nodes."
        for name, limit in limits.items()
        if limit and limit <= nodes
    ]


def _needs_v2(found: str) -> str:
    return (
        f"ddtree needs vLLM's Model Runner V2, but {found}. Set VLLM_USE_V2_MODEL_RUNNER=1 or use a "
        "configuration that V2 supports."
    )
