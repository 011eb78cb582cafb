"""The GPU worker: vLLM's own, with our model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_ddtree.engine.runner import TreeRunnerMixin


class TreeModelRunner(TreeRunnerMixin, GPUModelRunner):
    """Model Runner V2 for trees on a GPU."""


class TreeWorker(Worker):
    """A GPU worker whose runner verifies trees."""

    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            raise ValueError("ddtree needs vLLM's Model Runner V2; set VLLM_USE_V2_MODEL_RUNNER=1.")
        from vllm_ddtree.engine import attention_gpu, checks

        problems = attention_gpu.probe()
        if problems:
            raise checks.refusal(problems)
        # A member of the enum, not a new name: spawned workers could not unpickle one.
        register_backend(
            AttentionBackendEnum.CUSTOM, "vllm_ddtree.engine.attention_gpu.TreeFlashAttentionBackend"
        )
        return TreeModelRunner(self.vllm_config, self.device)
