"""Says what is wrong with a wheel before anyone installs it; exit status 1 when something is.

Run by scripts/build_wheel.sh in its environment .venv-wheel, which has auditwheel, abi3audit and cuobjdump:
`.venv-wheel/bin/python scripts/check_wheel.py dist/*.whl`. Owns what a wheel must be; tests/test_wheel.py
breaks each of it. Where the source tree is around, every module of it must be inside.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).parent.parent
LIBRARY = "vllm_ddtree/_C.abi3.so"
TAG = "cp310-abi3-manylinux_2_28_x86_64"  # 2_28: the wheels of torch and vLLM, without which ours is no use
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
PTX = "sm_120"  # the newest, for GPUs to come
ENTRY_POINTS = {
    "vllm.general_plugins": {"ddtree": "vllm_ddtree.plugin:register"},
    "vllm.platform_plugins": {"ddtree_cpu": "vllm_ddtree.engine.cpu_mode:platform_hook"},
    "console_scripts": {"vllm-ddtree-status": "vllm_ddtree.status:main"},
}
# 1.6 MB when this was written, nearly all of it code for six targets. A few times that is debug information,
# a library that should have been left out, or a model.
MAX_BYTES = 5_000_000
TORCH = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
SYSTEM |= {"libdl.so.2", "libpthread.so.0", "librt.so.1"}
LINKER = {"_ITM_registerTMCloneTable", "_ITM_deregisterTMCloneTable", "__gmon_start__"}
# Defined by a CUDA build of torch only, so it must be weak.
STREAM = "aoti_torch_get_current_cuda_stream"


class Wheel:
    """A wheel, unpacked into a folder."""

    def __init__(self, path: Path, folder: Path):
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.names = [name for name in archive.namelist() if not name.endswith("/")]
            archive.extractall(folder)
        self.folder = folder
        self.library = folder / LIBRARY

    def info(self, name: str) -> str:
        """A file of the dist-info folder, empty where it is missing."""
        found = list(self.folder.glob(f"*.dist-info/{name}"))
        return found[0].read_text() if found else ""


def files(wheel: Wheel) -> Iterator[str]:
    """The package's modules, one library and the metadata; no tests, models or sources."""
    libraries = [name for name in wheel.names if ".so" in Path(name).suffixes]
    if libraries != [LIBRARY]:
        yield f"its only library must be {LIBRARY}; found {libraries}"
    for name in wheel.names:
        top = name.split("/")[0]
        if not (top.endswith(".dist-info") or (top == "vllm_ddtree" and name.endswith((".py", ".so")))):
            yield f"{name} does not belong in it"
    for module in sorted((ROOT / "vllm_ddtree").rglob("*.py")):
        if module.relative_to(ROOT).as_posix() not in wheel.names:
            yield f"{module.relative_to(ROOT)} is missing"


def size(wheel: Wheel) -> Iterator[str]:
    """A bound that only an accident exceeds."""
    found = wheel.path.stat().st_size
    if found > MAX_BYTES:
        yield f"it has {found:,} bytes, more than {MAX_BYTES:,}; what made it grow?"


def metadata(wheel: Wheel) -> Iterator[str]:
    """What vLLM finds the plugin by, the licence, and tags that are those of the file's name."""
    found = configparser.ConfigParser(delimiters=("=",))
    found.read_string(wheel.info("entry_points.txt"))
    for group, entries in ENTRY_POINTS.items():
        if not found.has_section(group) or dict(found[group]) != entries:
            yield f"its entry points must have [{group}] {entries}"
    if "Apache License" not in wheel.info("licenses/LICENSE"):
        yield "the licence is missing"
    named = "-".join(wheel.path.stem.split("-")[2:])
    tags = Parser().parsestr(wheel.info("WHEEL")).get_all("Tag")
    if named != TAG or tags != [TAG]:
        yield f"its tag must be {TAG}; found {named} in its name and {tags} inside"


def manylinux(wheel: Wheel) -> Iterator[str]:
    """The tag is true: no symbol of a newer libc or libstdc++, no library that is not everywhere."""
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", wheel.path], capture_output=True, text=True
    )
    if done.returncode:
        yield f"auditwheel: {done.stderr.strip()}"
        return
    report = json.loads(done.stdout)
    allowed = [int(re.findall(r"manylinux_2_(\d+)_", tag)[0]) for tag in (report["sym_tag"], TAG)
               if "manylinux_2_" in tag]  # fmt: skip
    if len(allowed) < 2 or allowed[0] > allowed[1]:
        yield f"its symbols allow {report['sym_tag']} ({report['versioned_symbols']}), its tag is {TAG}"
    if report["unsupported_isa"]:
        yield "its code needs a newer CPU than x86-64's first"


def abi3(wheel: Wheel) -> Iterator[str]:
    """One library for every Python from 3.10 on."""
    done = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", "--report", "--assume-minimum-abi3", "3.10",
         wheel.path], capture_output=True, text=True,
    )  # fmt: skip
    try:
        results = [audit["result"] for spec in json.loads(done.stdout)["specs"].values()
                   for audit in spec["wheel"]]  # fmt: skip
    except (ValueError, KeyError):
        results = []
    bad = [
        symbol
        for result in results
        for symbol in (*result["non_abi3_symbols"], *result["future_abi3_objects"])
    ]
    if bad or done.returncode or not results:
        yield f"abi3audit: {bad or (done.stderr or done.stdout).strip()}"


def needed(wheel: Wheel) -> Iterator[str]:
    """Torch, or its weak stream symbol stays null on a GPU; no CUDA, which a CPU-only torch does not have."""
    tags = [tag for section in sections(wheel, DynamicSection) for tag in section.iter_tags()]
    found = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    if "libtorch.so" not in found:
        yield f"it must need libtorch.so; found {sorted(found)}"
    if found - TORCH - SYSTEM:
        yield f"it needs {sorted(found - TORCH - SYSTEM)}, which not every machine has"
    if any(tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH") for tag in tags):
        yield "it names folders of the machine it was built on (RPATH)"


def torch_floor(wheel: Wheel) -> Iterator[str]:
    """From torch only the C functions that 2.10 has; nothing else that is not a versioned system symbol."""
    shims = set((ROOT / "scripts" / "torch_2_10_shims.txt").read_text().split("\n"))
    for name, weak, versioned in undefined(wheel):
        if re.match(r"_Z.*N(K?)(3c10|2at|5torch)", name):
            yield f"it takes {name} from torch's C++ library, which changes with every release"
        elif name == STREAM:
            if not weak:
                yield f"{name} must be weak: a CPU-only torch has none"
        elif re.match(r"(aoti_)?torch_", name):
            if name not in shims:
                yield f"torch 2.10 has no {name}"
        elif not (versioned or name.startswith(("Py", "_Py")) or (weak and name in LINKER)):
            yield f"{name} has no version: it would come from whatever library happens to have it"


def architectures(wheel: Wheel) -> Iterator[str]:
    """Code of every kernel file for every GPU that is promised."""
    tool = shutil.which("cuobjdump") or f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin/cuobjdump"
    done = subprocess.run([tool, "--list-elf", "--list-ptx", wheel.library], capture_output=True, text=True)
    found = re.findall(r"\.(sm_\w+)\.(cubin|ptx)", done.stdout)
    wanted = [(name, "cubin") for name in ARCHITECTURES] + [(PTX, "ptx")]
    kernels = len(list((ROOT / "csrc" / "cuda").glob("*.cu")))
    for one in wanted:
        if found.count(one) != kernels:
            yield f"it must have {kernels} parts of {one[1]} for {one[0]}; found {found.count(one)}"


def sections(wheel: Wheel, kind: type) -> list:
    """The library's sections of one kind."""
    elf = ELFFile(wheel.library.open("rb"))
    return [section for section in elf.iter_sections() if isinstance(section, kind)]


def undefined(wheel: Wheel) -> Iterator[tuple[str, bool, bool]]:
    """Of each symbol that the loader must find: its name, whether it is weak, whether it has a version."""
    (versions,) = sections(wheel, GNUVerSymSection) or (None,)
    table = next(part for part in sections(wheel, SymbolTableSection) if part.name == ".dynsym")
    for index, symbol in enumerate(table.iter_symbols()):
        if symbol.name and symbol["st_shndx"] == "SHN_UNDEF":
            version = versions.get_symbol(index)["ndx"] if versions else "VER_NDX_GLOBAL"
            yield symbol.name, symbol["st_info"]["bind"] == "STB_WEAK", isinstance(version, int)


def glibc(wheel: Wheel) -> str:
    """The newest versions of system libraries that it asks for, for the log."""
    named = [aux.name for section in sections(wheel, GNUVerNeedSection)
             for _, parts in section.iter_versions() for aux in parts]  # fmt: skip

    def newest(prefix: str) -> str:
        found = [name for name in named if re.match(prefix + r"_\d", name)]
        return max(found, key=lambda name: [int(n) for n in name.split("_")[1].split(".")], default="none")

    return f"{newest('GLIBC')}, {newest('GLIBCXX')}, {newest('CXXABI')}"


CHECKS: tuple[Callable[[Wheel], Iterator[str]], ...] = (files, size, metadata, abi3, manylinux, needed,
                                                        torch_floor, architectures)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    path = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        wheel = Wheel(path, Path(folder))
        problems = []
        for check in CHECKS:
            if check in CHECKS[3:] and not wheel.library.is_file():
                continue  # said by files
            problems += [f"{check.__name__}: {problem}" for problem in check(wheel)]
        if not problems:
            gpus = f"{', '.join(ARCHITECTURES)} and PTX"
            print(f"{path}: fine, {path.stat().st_size:,} bytes, {gpus}; {glibc(wheel)}")
    for problem in problems:
        print(f"{path.name}: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
