"""setup.py as pip runs it: what it builds, and that it never builds without a word what can't serve here."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import copy_source, environment, pip_wheel

GPU = Path("/dev/nvidia0").exists()


@pytest.fixture
def source(tmp_path) -> Path:
    return copy_source(tmp_path / "source")


@pytest.fixture
def machine(tmp_path):
    return lambda **what: environment(tmp_path / "bin", **what)


@pytest.mark.parametrize(
    ("compiler", "found"),
    [
        (True, "found no nvcc with libcudart_static.a in CUDA_HOME=/nowhere"),
        (False, "found no C++20 compiler"),
    ],
)
def test_a_gpu_without_a_compiler_fails_with_one_sentence(source, machine, compiler, found):
    status, text, wheels = pip_wheel(source, machine(gpu=True, compiler=compiler))
    assert status != 0 and not wheels
    assert text.count("has an NVIDIA GPU") == 1, text
    sentence = next(line for line in text.splitlines() if "has an NVIDIA GPU" in line)
    for words in (found, "pip install vllm_ddtree-*.whl", "DDTREE_BUILD_CUDA=0"):
        assert words in sentence, text


def test_a_gpu_and_a_build_that_does_not_see_torch(source, machine):
    """What pip's build isolation, its default, does."""
    (source / "torch.py").write_text("raise ImportError('isolated')\n")
    status, text, wheels = pip_wheel(source, machine(gpu=True, PYTHONPATH=str(source)))
    assert status != 0 and not wheels
    assert "can't import torch (isolated; --no-build-isolation" in text, text


def test_kernels_that_do_not_compile_fail_on_a_gpu(source, machine):
    (source / "csrc" / "bindings.cpp").write_text("#error broken\n")
    status, text, wheels = pip_wheel(source, machine(gpu=True, CUDA_HOME=str(fake_toolkit(source))))
    assert status != 0 and not wheels
    assert "failed to compile the kernels" in text and "has an NVIDIA GPU" in text, text


def test_kernels_that_do_not_compile_elsewhere(source, machine):
    if GPU:
        pytest.skip("this machine has a GPU")
    (source / "csrc" / "bindings.cpp").write_text("#error broken\n")
    status, text, wheels = pip_wheel(source, machine())
    assert status == 0 and len(wheels) == 1, text


@pytest.mark.parametrize(
    "variables", [{"DDTREE_BUILD_EXT": "0"}, {"DDTREE_BUILD_CUDA": "0", "CXX": "no-such-compiler"}]
)
def test_less_than_a_gpu_needs_where_it_is_asked_for(source, machine, variables):
    status, text, wheels = pip_wheel(source, machine(gpu=True, compiler=False, **variables))
    assert status == 0 and len(wheels) == 1, text


def test_cuda_that_is_asked_for_is_not_left_out(source, machine):
    status, text, wheels = pip_wheel(source, machine(DDTREE_BUILD_CUDA="1"))
    assert status != 0 and not wheels
    assert "DDTREE_BUILD_CUDA=1, but the build found no nvcc" in text


def fake_toolkit(source: Path) -> Path:
    """Enough of a toolkit for setup.py to take it."""
    toolkit = source / "cuda"
    for name in ("bin/nvcc", "lib64/libcudart_static.a", "include/cuda_runtime_api.h"):
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        (toolkit / name).chmod(0o755)
    return toolkit
