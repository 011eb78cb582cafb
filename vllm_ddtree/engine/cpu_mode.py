"""Model Runner V2 on a machine without a GPU: the real engine, through Triton's interpreter.

For tests and demonstrations. Active only when the user sets TRITON_INTERPRET=1 and
VLLM_USE_V2_MODEL_RUNNER=1 (the scripts do). It then lets vLLM see a Triton backend named "cpu" and puts
PyTorch in the place of stock functions that the interpreter can't run, or runs far too slowly.
Invariant: a stand-in returns exactly what vLLM's own function is defined to return.
"""

from __future__ import annotations

import os
from typing import Any

_SWITCHES = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def cpu_mode_requested() -> bool:
    """Return whether the environment asks for Model Runner V2 on a CPU."""
    return all(os.environ.get(name) == value for name, value in _SWITCHES.items())


def platform_hook() -> None:
    """Entry point of ``vllm.platform_plugins``; runs before vLLM looks for a Triton backend.

    Always returns None (this is no platform) and never raises.
    """
    if not cpu_mode_requested():
        return
    try:
        from triton.backends import Backend, backends

        if not any(backend.driver.is_active() for backend in backends.values()):
            backends.setdefault("cpu", Backend(compiler=None, driver=_InterpreterDriver))  # type: ignore[arg-type]
    except Exception:  # no Triton, or another Triton: cpu_mode_problem will say so
        return


class _InterpreterDriver:
    """What vLLM asks of a backend's driver; the interpreter needs none."""

    @staticmethod
    def is_active() -> bool:
        """Say that kernels can run."""
        return True


def cpu_mode_problem() -> str | None:
    """Return the sentence for a user who starts ddtree on a CPU that is not set up for it, or None."""
    missing = [f"{name}={value}" for name, value in _SWITCHES.items() if os.environ.get(name) != value]
    if missing:
        return (
            "on a CPU, ddtree needs vLLM's Model Runner V2 through Triton's interpreter, which is off: set "
            f"{' and '.join(missing)} before starting vLLM. It is slow and meant for tests."
        )
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        plugins = os.environ.get("VLLM_PLUGINS")
        why = (
            f"VLLM_PLUGINS={plugins!r} leaves out ddtree_cpu; add it"
            if plugins is not None and "ddtree_cpu" not in plugins.split(",")
            else "its platform plugin ddtree_cpu did not run; unset VLLM_TARGET_DEVICE and reinstall vllm-ddtree"
        )
        return f"on a CPU, ddtree needs Triton's interpreter, but vLLM found no Triton backend: {why}."
    return None


def install_torch_kernels() -> None:
    """Put the PyTorch stand-ins in place, once per process; does nothing outside CPU mode."""
    global _installed
    if _installed or not cpu_mode_requested():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.worker.gpu.sample import gumbel

    original = gumbel.gumbel_sample

    def gumbel_sample(logits: Any, rows: Any, temperature: Any, *args: Any, **kwargs: Any) -> Any:
        # Nine tenths of an interpreted greedy step went into drawing noise that is not used.
        if kwargs.get("logits_cache") is None and not temperature[rows.clamp(min=0)].any():
            return logits.float().argmax(dim=-1)
        return original(logits, rows, temperature, *args, **kwargs)

    register_kernels(
        {
            "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": _apply_grammar_bitmask,
            "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p": _apply_top_k_top_p,
            "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample": gumbel_sample,
        }
    )
    _installed = True


_installed = False


def _apply_top_k_top_p(logits: Any, k: Any, p: Any) -> Any:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return logits if k is None and p is None else apply_top_k_top_p_pytorch(logits, k, p)


def _apply_grammar_bitmask(
    logits: Any,
    logits_stride: int,
    mapping: Any,
    cu_num_logits: Any,
    bitmask: Any,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Set logits [rows, vocab] to -inf where the packed mask [masks, words] has a 0 bit."""
    import torch

    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    banned = bits.reshape(bitmask.shape[0], -1)[:, :vocab_size] == 0
    for mask, place in zip(banned, mapping.tolist(), strict=True):
        request, position = divmod(place, MASK_STRIDE)
        begin, end = cu_num_logits[request : request + 2].tolist()
        if position < end - begin:
            logits[begin + position].masked_fill_(mask, float("-inf"))
