"""Builds the one extension module, vllm_ddtree/_C.abi3.so; all metadata is in pyproject.toml.

Owns: which sources are compiled with what. With nvcc: CPU and CUDA; without: CPU only; without a C++
compiler, or when compiling fails: no module, and the package runs its reference path. Where an NVIDIA
GPU is visible, which ddtree serves with CUDA kernels only, anything less fails the install in one sentence.
Environment: DDTREE_BUILD_CUDA=0 skips CUDA, =1 demands it; DDTREE_BUILD_EXT=0 skips the module;
DDTREE_REQUIRE_EXT=1 makes a failed build fatal (for wheels); TORCH_CUDA_ARCH_LIST; CUDA_HOME, where set, is
the only place a toolkit is taken from; MAX_JOBS.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

# 2.10: 2.9 lacks const_data_ptr, and a module built for a newer target would not load on an older torch.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020A000000000000ULL"
# Ampere, Ada, Hopper, Blackwell twice; PTX for what comes after. 8.0 is the floor: the builder needs
# __reduce_max_sync.
ARCHITECTURES = "8.0;8.9;9.0;10.0;12.0+PTX"
SKIPPED = os.environ.get("DDTREE_BUILD_EXT") == "0"
REQUIRED = os.environ.get("DDTREE_REQUIRE_EXT") == "1"
CUDA = os.environ.get("DDTREE_BUILD_CUDA", "")
REFERENCE = "no kernels, the package uses its slower reference path"


def say(text):
    """Tells the installer what is built and why not; pip shows it with -v, or when the build fails."""
    print(f"vllm-ddtree: {text}", file=sys.stderr)


def has_gpu():
    """Whether this machine has an NVIDIA GPU."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    tool = shutil.which("nvidia-smi")  # under WSL a GPU is no such device
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).stdout.startswith(b"GPU")


def lacks(what, instead, cuda_only=False):
    """Goes on without a module, or without CUDA in it, unless that is not enough here.

    what: "found no nvcc" or the like; instead: what is built without it; cuda_only: the CPU's part is there.
    """
    if REQUIRED and not cuda_only:
        raise SystemExit(f"vllm-ddtree: DDTREE_REQUIRE_EXT=1, but the build {what}")
    if CUDA == "1":
        raise SystemExit(
            f"vllm-ddtree: DDTREE_BUILD_CUDA=1, but the build {what}; the wheel (pip install "
            "vllm_ddtree-*.whl) needs no compiler"
        )
    if CUDA != "0" and has_gpu():
        raise SystemExit(
            f"vllm-ddtree: this machine has an NVIDIA GPU, but the build {what}; ddtree serves a GPU with "
            "its compiled CUDA kernels only, so nothing is installed. Install the wheel (pip install "
            "vllm_ddtree-*.whl, no compiler needed), or build with a C++20 compiler, a CUDA 13 toolkit (nvcc "
            "on PATH or in CUDA_HOME) and --no-build-isolation, or set DDTREE_BUILD_CUDA=0 for an install "
            "that can't use this GPU."
        )
    say(f"the build {what}: {instead}")


def find_cuda():
    """The toolkit to build with, or None for a CPU-only module."""
    if CUDA == "0":
        say("DDTREE_BUILD_CUDA=0: building the CPU kernels only")
        return None
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    homes = [named] if named else ["/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc and not named:
        homes.insert(0, Path(nvcc).resolve().parent.parent)
    for home in map(Path, homes):
        # The nvcc on PATH may be a wrapper that lives outside its toolkit, so the runtime decides.
        if (home / "bin" / "nvcc").exists() and cudart_dir(home):
            return home
    where = f"in CUDA_HOME={named}" if named else "on PATH or in /usr/local/cuda"
    lacks(f"found no nvcc with libcudart_static.a {where}", "CPU kernels only", cuda_only=True)
    return None


def cudart_dir(home):
    """Where the static CUDA runtime of a toolkit lies, or None."""
    places = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    return next((home / place for place in places if (home / place / "libcudart_static.a").exists()), None)


def sources(*patterns):
    """Repository-relative sources in a fixed order."""
    root = Path(__file__).parent
    return [str(path.relative_to(root)) for pattern in patterns for path in sorted(root.glob(pattern))]


def extension(cpp_extension):
    """The module, with CUDA where a toolkit is found."""
    home = find_cuda()
    # Torch's headers as system headers: their warnings are not ours to fix.
    system = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    cxx = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    cxx += [TORCH_TARGET, "-DTORCH_STABLE_ONLY", *system]
    # Error messages name the file, not the folder it was built in.
    cxx += [f"-ffile-prefix-map={Path(__file__).resolve().parent}/="]
    files = sources("csrc/*.cpp", "csrc/cpu/*.cpp")
    link = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    arguments = {"cxx": cxx}
    if home is not None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
        cpp_extension.CUDA_HOME = str(home)  # torch leaves it unset when it is a CPU-only build
        files += sources("csrc/cuda/*.cpp", "csrc/cuda/*.cu")
        cxx += ["-isystem", str(home / "include")]
        arguments["nvcc"] = [
            "-std=c++20",
            "-O3",
            "--expt-relaxed-constexpr",
            "-Xcompiler",
            "-fvisibility=hidden",
        ]
        link += [f"-L{cudart_dir(home)}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return cpp_extension.CppExtension(
        "vllm_ddtree._C", files, py_limited_api=True, extra_compile_args=arguments, extra_link_args=link,
    )  # fmt: skip


def forgiving(base):
    """A build_ext that reports a failure and goes on without the module."""

    class BuildExtension(base):
        skipped = False

        def run(self):
            try:
                super().run()
            except Exception as error:
                self._skip(error)

        def build_extension(self, ext):
            try:
                super().build_extension(ext)
            except Exception as error:
                self._skip(error)

        def copy_extensions_to_source(self):
            if not self.skipped:
                super().copy_extensions_to_source()

        def _skip(self, error):
            if REQUIRED:
                raise error
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            lacks(f"failed to compile the kernels ({reason})", REFERENCE)
            self.skipped = True
            for ext in self.extensions:
                ext.optional = True

    return BuildExtension


def options():
    """What setup() gets: nothing where the module cannot be built."""
    if SKIPPED:
        say(f"DDTREE_BUILD_EXT=0: {REFERENCE}")
        return {}
    try:
        from torch.utils import cpp_extension
    except Exception as error:
        if REQUIRED:
            raise
        lacks(f"can't import torch ({error}; --no-build-isolation lets it see yours)", REFERENCE)
        return {}
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None and shutil.which("g++") is None:
        lacks("found no C++20 compiler", REFERENCE)
        return {}
    return {
        "ext_modules": [extension(cpp_extension)],
        "cmdclass": {"build_ext": forgiving(cpp_extension.BuildExtension)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**options())
