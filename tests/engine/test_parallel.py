"""Two tensor-parallel ranks say what one rank says without speculation."""

from __future__ import annotations

import pytest
from engines import GPU, engine, generate, greedy, prompts, tree


@pytest.mark.slow
@pytest.mark.parametrize(
    "eager", [True, pytest.param(False, marks=pytest.mark.skipif(not GPU, reason="graphs need a GPU"))]
)
def test_two_ranks(tiny, monkeypatch, eager):
    asked = prompts(3, seed=5)
    with engine(tiny) as llm:
        plain = generate(llm, asked, greedy(8))
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", "0|1"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        # On a CPU vLLM compiles a sharded embedding, and looks for a Triton target
        *([] if GPU else [("TORCH_COMPILE_DISABLE", "1")]),
    ):
        monkeypatch.setenv(name, value)
    with engine(tiny, tree(16), tensor_parallel_size=2, enforce_eager=eager) as llm:
        assert generate(llm, asked, greedy(8)) == plain
