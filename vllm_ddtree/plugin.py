"""vLLM's entry point: tiny, idempotent, and without effect on engines that don't ask for ddtree.

vLLM calls ``register`` in every process and swallows import errors, but an exception inside it stops
every ``vllm serve`` on the machine. So it never raises; a problem is kept for the engine that asks.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm_ddtree")


def register() -> None:
    """Teach vLLM's argument parser about ``method: ddtree``. Safe to call any number of times.

    On a CPU where the user switched the interpreter mode on, also install its stand-ins.
    """
    try:
        from vllm_ddtree.engine import cpu_mode, hooks

        hooks.install()
        cpu_mode.install_torch_kernels()
    except Exception as error:
        logger.warning("vllm-ddtree could not be registered and is not available: %r", error)
