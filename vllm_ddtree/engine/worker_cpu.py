"""The CPU worker: vLLM's own, with our model runner and attention. For tests, not for speed."""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.cpu import model_runner as cpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_ddtree.engine.attention_cpu import TreeCPUAttentionBackend, TreeCPUAttentionImpl
from vllm_ddtree.engine.cpu_mode import install_torch_kernels
from vllm_ddtree.engine.runner import TreeRunnerMixin


class TreeCPUModelRunner(TreeRunnerMixin, cpu_model_runner.CPUModelRunner):
    """Model Runner V2 for trees on a CPU, through Triton's interpreter."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the models and give every layer the plain attention.

        vLLM's CPU platform offers one backend and caches the choice for the process, so it is replaced in
        the layers of this engine instead of in the registry, where it would reach other engines too.
        """
        super().load_model(*args, **kwargs)
        for layer in get_layers_from_vllm_config(self.vllm_config, Attention).values():
            layer.attn_backend = TreeCPUAttentionBackend
            layer.impl.__class__ = TreeCPUAttentionImpl


class TreeCPUWorker(CPUWorker):
    """A CPU worker whose runner verifies trees."""

    def init_device(self) -> None:
        """Set the device up; vLLM's CPU worker imports its runner class here, so it is swapped here."""
        install_torch_kernels()
        with mock.patch.object(cpu_model_runner, "CPUModelRunner", TreeCPUModelRunner):
            super().init_device()
