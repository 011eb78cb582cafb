"""Other machines, as far as installing goes: their programs, their GPU, and what pip makes there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def copy_source(folder: Path) -> Path:
    """A copy of what the build reads, with a package of one file."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "vllm_ddtree").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "vllm_ddtree/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def environment(folder: Path, gpu: bool = False, compiler: bool = True, **variables: str) -> dict[str, str]:
    """The environment of a machine without nvcc; its programs go into an empty folder."""
    folder.mkdir()
    names = ["sh", "env", "uname", "readelf", "ninja", "ldd"]
    names += ["c++", "g++", "gcc", "cc", "as", "ld"] if compiler else []
    for name in names:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    if gpu:  # answers as the driver's tool does; /dev/nvidia0 can't be made up
        smi = folder / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
        smi.chmod(0o755)
    hidden = ("DDTREE_", "CUDA", "LDFLAGS", "CXX", "TORCH_CUDA")
    keep = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    # CUDA_HOME, where set, is the only place looked at, which hides a toolkit in /usr/local.
    return keep | {"PATH": str(folder), "CUDA_HOME": "/nowhere", "MAX_JOBS": "2"} | variables


def pip_wheel(source: Path, variables: dict[str, str]) -> tuple[int, str, list[Path]]:
    """Exit status, output and wheels of pip in that environment."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "-w", source / "out", source], env=variables, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr, list((source / "out").glob("*.whl"))
