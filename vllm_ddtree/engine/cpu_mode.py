"""Model Runner V2 on a machine without a GPU: the real engine, through Triton's interpreter.

For tests and demonstrations. Active only when the user sets TRITON_INTERPRET=1 and
VLLM_USE_V2_MODEL_RUNNER=1 (the scripts do). It then lets vLLM see a Triton backend named "cpu" and puts the
stand-ins of cpu_kernels in place. Invariant: without the two switches, nothing in vLLM or Triton changes.
"""

from __future__ import annotations

import os

from vllm_ddtree.status import version_problem

_SWITCHES = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def cpu_mode_requested() -> bool:
    """Return whether the environment asks for Model Runner V2 on a CPU, on a version of vLLM we know."""
    return all(os.environ.get(name) == value for name, value in _SWITCHES.items()) and not version_problem()


def platform_hook() -> None:
    """Entry point of ``vllm.platform_plugins``; runs before vLLM looks for a Triton backend.

    Always returns None (this is no platform) and never raises.
    """
    if not cpu_mode_requested():
        return
    try:
        from triton.backends import Backend, backends

        if not any(backend.driver.is_active() for backend in backends.values()):
            stub = Backend(compiler=None, driver=_InterpreterDriver)  # type: ignore[arg-type]
            backends.setdefault("cpu", stub)
    except Exception:  # no Triton, or another Triton: cpu_mode_problem will say so
        return


class _InterpreterDriver:
    """What vLLM asks of a backend's driver; the interpreter needs none."""

    @staticmethod
    def is_active() -> bool:
        """Say that kernels can run."""
        return True


def switches_problem() -> str | None:
    """Return the sentence for a CPU where the mode is off, or None. Needs no vLLM."""
    missing = [f"{name}={value}" for name, value in _SWITCHES.items() if os.environ.get(name) != value]
    if missing:
        return (
            "on a CPU, ddtree needs vLLM's Model Runner V2 through Triton's interpreter, which is off: set "
            f"{' and '.join(missing)} before starting vLLM. It is slow and meant for tests."
        )
    return None


def cpu_mode_problem() -> str | None:
    """Return the sentence for a user who starts ddtree on a CPU that is not set up for it, or None."""
    problem = switches_problem()
    if problem:
        return problem
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        plugins = os.environ.get("VLLM_PLUGINS")
        why = (
            f"VLLM_PLUGINS={plugins!r} leaves out ddtree_cpu; add it"
            if plugins is not None and "ddtree_cpu" not in plugins.split(",")
            else "the platform plugin ddtree_cpu did not run; unset VLLM_TARGET_DEVICE, reinstall vllm-ddtree"
        )
        return f"on a CPU, ddtree needs Triton's interpreter, but vLLM found no Triton backend: {why}."
    return None


def install_torch_kernels() -> None:
    """Put the stand-ins in place, once per process; does nothing outside CPU mode."""
    global _installed
    if _installed or not cpu_mode_requested():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.triton_utils.dispatcher import register_kernels

    from vllm_ddtree.engine.cpu_kernels import normalize_context_k, stand_ins

    register_kernels(stand_ins())
    DFlashQwen3Model._normalize_context_k = normalize_context_k
    _installed = True


_installed = False
