"""Copies a static library so that what is linked with it needs an older glibc than this machine's.

glibc 2.34 moved threads and dlopen into libc.so.6 under new versions of their symbols and kept the old
ones. A linker takes the newest, so the CUDA runtime would bind a module to 2.34. The copy names the newest
version that the floor has: `python scripts/glibc_floor.py libcudart_static.a COPY`. check_wheel.py checks
what comes out.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

FLOOR = (2, 28)  # manylinux_2_28: what the wheels of torch and vLLM need
EXPORT = re.compile(r"\sD[FO]\s+\.\S+\s+[0-9a-f]+\s+(\()?GLIBC_([\d.]+)\)?\s+(\S+)$", re.MULTILINE)


def older_versions() -> dict[str, str]:
    """Symbol -> "symbol@GLIBC_x", for those of this libc whose default version is above the floor."""
    libc = output("gcc", "-print-file-name=libc.so.6").strip()
    found: dict[str, dict[tuple[int, ...], bool]] = {}
    for hidden, version, name in EXPORT.findall(output("objdump", "-T", libc)):
        found.setdefault(name, {})[tuple(map(int, version.split(".")))] = not hidden
    renamed = {}
    for name, versions in found.items():
        below = [version for version in versions if version <= FLOOR]
        if below and any(default and version > FLOOR for version, default in versions.items()):
            renamed[name] = f"{name}@GLIBC_{'.'.join(map(str, max(below)))}"
    return renamed


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(library: str, copy: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".syms") as table:
        table.writelines(f"{old} {new}\n" for old, new in sorted(older_versions().items()))
        table.flush()
        output("objcopy", f"--redefine-syms={table.name}", library, copy)


if __name__ == "__main__":
    main(*sys.argv[1:])
