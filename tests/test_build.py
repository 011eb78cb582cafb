"""setup.py as pip runs it: what it builds, and that it never builds without a word what can't serve here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GPU = Path("/dev/nvidia0").exists()


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of what the build reads."""
    copy = tmp_path / "source"
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    (copy / "vllm_ddtree").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "vllm_ddtree/__init__.py"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def machine(tmp_path):
    """A function that makes the environment of another machine: which programs it has."""

    def make(gpu: bool = False, compiler: bool = True, **variables: str) -> dict[str, str]:
        programs = tmp_path / "bin"
        programs.mkdir()
        wanted = ["sh", "env", "uname", "readelf", "ninja", "ldd"]
        wanted += ["c++", "g++", "gcc", "cc", "as", "ld"] if compiler else []
        for name in wanted:
            if found := shutil.which(name):
                (programs / name).symlink_to(found)
        if gpu:  # the same answer as the driver's tool gives; /dev/nvidia0 can't be made here
            smi = programs / "nvidia-smi"
            smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
            smi.chmod(0o755)
        keep = {
            k: v for k, v in os.environ.items() if not k.startswith(("DDTREE_", "CUDA", "LDFLAGS", "CXX"))
        }
        # CUDA_HOME, where it is set, is the only place looked at: hides a toolkit in /usr/local.
        return keep | {"PATH": str(programs), "CUDA_HOME": "/nowhere", "MAX_JOBS": "2"} | variables

    return make


def pip_wheel(source: Path, environment: dict[str, str]) -> tuple[int, str, list[Path]]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "-w", source / "out", source], env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr, list((source / "out").glob("*.whl"))


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
