"""scripts/check_wheel.py refuses what must not reach users: the wheel in dist/, broken one way at a time.

Needs a wheel, which scripts/build_wheel.sh makes (CI does, before the tests); skipped without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / ".venv-wheel"
LIBRARY = "vllm_ddtree/_C.abi3.so"
INFO = "vllm_ddtree-0.1.0.dist-info"


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = list((ROOT / "dist").glob("vllm_ddtree-*.whl"))
    if not found:
        assert os.environ.get("CI") != "true", "CI must build the wheel before the tests"
        pytest.skip("no wheel in dist/: run scripts/build_wheel.sh")
    return found[0]


def check(wheel: Path) -> tuple[int, str]:
    command = [TOOLS / "bin" / "python", ROOT / "scripts" / "check_wheel.py", wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def doctored(wheel: Path, folder: Path, changes: dict[str, bytes | None], name: str | None = None) -> Path:
    """A copy of the wheel with files replaced, added or (None) left out."""
    copy = folder / (name or wheel.name)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            if item.filename not in changes:
                new.writestr(item, old.read(item))
        for path, data in changes.items():
            if data is not None:
                new.writestr(path, data)
    return copy


def test_the_wheel_is_fine(wheel):
    status, text = check(wheel)
    assert (status, len(text.splitlines())) == (0, 1), text
    assert ": fine, " in text and "sm_120 and PTX" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({LIBRARY: None}, "files: its only library must be vllm_ddtree/_C.abi3.so; found []"),
        ({LIBRARY: None, "vllm_ddtree/_C.cpython-311-x86_64-linux-gnu.so": b"x"}, "files: its only library"),
        ({"vllm_ddtree/libcudart.so.13": b"x"}, "files: its only library"),
        ({"vllm_ddtree/model.safetensors": b"x"}, "model.safetensors does not belong in it"),
        ({"tests/test_plugin.py": b"x"}, "tests/test_plugin.py does not belong in it"),
        ({"vllm_ddtree/engine/config.py": None}, "vllm_ddtree/engine/config.py is missing"),
        ({"vllm_ddtree/large.py": os.urandom(5_000_000)}, "size: it has"),
        ({f"{INFO}/entry_points.txt": None}, "must have [vllm.general_plugins]"),
        (
            {f"{INFO}/entry_points.txt": b"[vllm.general_plugins]\nddtree = vllm_ddtree.plugin:register\n"},
            "must have [vllm.platform_plugins]",
        ),
        ({f"{INFO}/licenses/LICENSE": None}, "the licence is missing"),
        ({f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: cp310-abi3-linux_x86_64\n"}, "its tag must be"),
    ],
)
def test_files_and_metadata(wheel, tmp_path, changes, words):
    status, text = check(doctored(wheel, tmp_path, changes))
    assert status == 1 and words in text, text


def test_another_tag(wheel, tmp_path):
    name = wheel.name.replace("manylinux_2_28", "manylinux_2_17")
    status, text = check(doctored(wheel, tmp_path, {}, name))
    assert status == 1 and "metadata: its tag must be" in text, text


TORCH = Path(torch.__file__).parent / "lib"
CUDART = "-Wl,--no-as-needed {cuda}/lib/libcudart.so.13"


@pytest.mark.parametrize(
    ("symbol", "flags", "words"),
    [
        ("_PyLong_Sign", "", "abi3: abi3audit: ['_PyLong_Sign']"),  # private
        ("PyUnicode_AsUTF8", "", "abi3: abi3audit: "),  # in the limited API from 3.13 on
        ("_ZN3c106detail14torchCheckFailEPKcS2_jS2_", "", "takes _ZN3c106detail"),
        ("torch_from_blob", "", "torch 2.10 has no torch_from_blob"),
        ("aoti_torch_get_current_cuda_stream", "", "must be weak"),
        ("_ZSt28__throw_bad_array_new_lengthv", "", "has no version: it would come from whatever"),
        ("pthread_create", "", "manylinux: its symbols allow"),
        ("free", "", "needed: it must need libtorch.so"),
        ("free", CUDART, "needed: it needs ['libcudart.so.13']"),
        ("free", "-Wl,-rpath,/home/builder", "needed: it names folders"),
        ("free", "", "architectures: it must have 5 parts of cubin for sm_80; found 0"),
    ],
)
def test_a_library_that_would_not_load_everywhere(wheel, tmp_path, symbol, flags, words):
    if symbol == "pthread_create" and os.confstr("CS_GNU_LIBC_VERSION") < "glibc 2.34":
        pytest.skip("only glibc 2.34 gave pthread_create a new version")
    (tmp_path / "m.c").write_text(f"void {symbol}(void); void* PyInit__C(void) {{ {symbol}(); return 0; }}\n")
    (cuda,) = TOOLS.glob("lib/python*/site-packages/nvidia/cu13")
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", tmp_path / "m.so", tmp_path / "m.c"]
    subprocess.run([*command, *flags.format(cuda=cuda).split()], check=True)
    status, text = check(doctored(wheel, tmp_path, {LIBRARY: (tmp_path / "m.so").read_bytes()}))
    assert status == 1 and words in text, text


def test_a_library_for_one_gpu_only(wheel, tmp_path):
    (cuda,) = TOOLS.glob("lib/python*/site-packages/nvidia/cu13")
    (tmp_path / "k.cu").write_text("__global__ void k() {} void go() { k<<<1, 1>>>(); }\n")
    command = [cuda / "bin" / "nvcc", "-shared", "-Xcompiler", "-fPIC", f"-L{cuda}/lib", "-arch=sm_90"]
    subprocess.run([*command, "-o", tmp_path / "k.so", tmp_path / "k.cu"], check=True)
    status, text = check(doctored(wheel, tmp_path, {LIBRARY: (tmp_path / "k.so").read_bytes()}))
    assert status == 1, text
    for name in ("sm_80", "sm_89", "sm_100", "sm_120"):
        assert f"it must have 5 parts of cubin for {name}; found 0" in text, text
    assert "sm_90; found 0" not in text, text


def test_the_archive_asks_for_an_old_glibc_only(tmp_path):
    """What glibc_floor.py renames still links and runs here."""
    (tmp_path / "m.c").write_text(
        "void* dlopen(const char*, int); int main(void) { return !dlopen(0, 1); }\n"
    )
    subprocess.run(["gcc", "-c", "-o", "m.o", "m.c"], cwd=tmp_path, check=True)
    subprocess.run(["ar", "rc", "m.a", "m.o"], cwd=tmp_path, check=True)
    script = ROOT / "scripts" / "glibc_floor.py"
    subprocess.run([shutil.which("python3") or "python3", script, "m.a", "n.a"], cwd=tmp_path, check=True)
    subprocess.run(["gcc", "-o", "m", "n.a"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "m"], check=True)
    text = subprocess.run(["objdump", "-T", tmp_path / "m"], capture_output=True, text=True).stdout
    versions = {line.split("(")[1].split(")")[0] for line in text.splitlines() if " dlopen" in line}
    assert versions == {"GLIBC_2.2.5"}, text
