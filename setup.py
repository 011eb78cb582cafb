"""Builds the one extension module, vllm_ddtree/_C.abi3.so; all metadata is in pyproject.toml.

Owns: which sources are compiled with what. With nvcc: CPU and CUDA; without: CPU only; without a C++
compiler, or when compiling fails: no module, and the package runs its reference path. A failed build never
fails the install. Environment: DDTREE_BUILD_CUDA=0 skips CUDA, =1 demands it; DDTREE_BUILD_EXT=0 skips the
module; DDTREE_REQUIRE_EXT=1 makes a failed build fatal (for wheels); TORCH_CUDA_ARCH_LIST; CUDA_HOME;
MAX_JOBS.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

# 2.10: 2.9 lacks const_data_ptr, and a module built for a newer target would not load on an older torch.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020A000000000000ULL"
# Ampere, Ada, Hopper, Blackwell twice; PTX for what comes after. 8.0 is the floor: the builder needs
# __reduce_max_sync.
ARCHITECTURES = "8.0;8.9;9.0;10.0;12.0+PTX"
REQUIRED = os.environ.get("DDTREE_REQUIRE_EXT") == "1"


def say(text):
    """Tells the installer, whose stdout pip hides, what is built and why not."""
    print(f"vllm-ddtree: {text}", file=sys.stderr)


def find_cuda():
    """The toolkit to build with, or None for a CPU-only module."""
    wanted = os.environ.get("DDTREE_BUILD_CUDA", "")
    if wanted == "0":
        say("DDTREE_BUILD_CUDA=0: building the CPU kernels only")
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(Path(nvcc).resolve().parent.parent)
    homes.append("/usr/local/cuda")
    for home in map(Path, filter(None, homes)):
        # The nvcc on PATH may be a wrapper that lives outside its toolkit, so the runtime decides.
        if (home / "bin" / "nvcc").exists() and cudart_dir(home):
            return home
    if wanted == "1":
        raise SystemExit(
            "vllm-ddtree: DDTREE_BUILD_CUDA=1 needs nvcc and libcudart_static.a, found no toolkit with both "
            "on PATH or in CUDA_HOME; install the CUDA toolkit or unset the variable for a CPU-only module"
        )
    say("no nvcc with libcudart_static.a on PATH or in CUDA_HOME: building the CPU kernels only")
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
            say(f"the kernels were not built ({reason}); the package will use its slower reference path")
            self.skipped = True
            for ext in self.extensions:
                ext.optional = True

    return BuildExtension


def options():
    """What setup() gets: nothing where the module cannot be built."""
    if os.environ.get("DDTREE_BUILD_EXT") == "0":
        say("DDTREE_BUILD_EXT=0: no kernels, the package will use its slower reference path")
        return {}
    try:
        from torch.utils import cpp_extension
    except Exception as error:
        if REQUIRED:
            raise
        say(
            f"torch cannot be imported here ({error}): no kernels. "
            "Install with --no-build-isolation to build them"
        )
        return {}
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None and shutil.which("g++") is None:
        if REQUIRED:
            raise SystemExit(
                "vllm-ddtree: DDTREE_REQUIRE_EXT=1 needs a C++20 compiler, found none; install g++"
            )
        say("no C++ compiler found: no kernels, the package will use its slower reference path")
        return {}
    return {
        "ext_modules": [extension(cpp_extension)],
        "cmdclass": {"build_ext": forgiving(cpp_extension.BuildExtension)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**options())
