"""Builds the one extension module, vllm_ddtree/_C.abi3.so; all metadata is in pyproject.toml.

Owns: which sources are compiled with what. With nvcc: CPU and CUDA; without: CPU only; without a C++ compiler, or
when compiling fails: no module, and the package runs its reference path. A failed build never fails the install.
Environment: DDTREE_BUILD_CUDA=0 skips CUDA, =1 demands it; DDTREE_BUILD_EXT=0 skips the module;
DDTREE_REQUIRE_EXT=1 makes a failed build fatal (for wheels); TORCH_CUDA_ARCH_LIST; CUDA_HOME; MAX_JOBS.
"""

import glob
import os
import shutil
import sys

from setuptools import setup

# 2.10: 2.9 lacks const_data_ptr, and a module built for a newer target would not load on an older torch.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020A000000000000ULL"
# Ampere, Hopper, Blackwell; PTX for what comes after. 8.0 is the floor: the builder needs __reduce_max_sync.
ARCHITECTURES = "8.0;9.0;10.0+PTX"
REQUIRED = os.environ.get("DDTREE_REQUIRE_EXT") == "1"


def say(text):
    print(f"vllm-ddtree: {text}", file=sys.stderr)


def find_cuda():
    wanted = os.environ.get("DDTREE_BUILD_CUDA", "")
    if wanted == "0":
        say("DDTREE_BUILD_CUDA=0: building the CPU kernels only")
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.insert(2, os.path.dirname(os.path.dirname(os.path.realpath(nvcc))))
    for home in filter(None, homes):
        if os.path.exists(os.path.join(home, "bin", "nvcc")):
            return home
    if wanted == "1":
        raise SystemExit(
            "vllm-ddtree: DDTREE_BUILD_CUDA=1 needs nvcc, found none on PATH or in CUDA_HOME; install the CUDA "
            "toolkit or unset the variable for a CPU-only module"
        )
    say("no nvcc on PATH or in CUDA_HOME: building the CPU kernels only")
    return None


def cudart_dir(home):
    for place in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if os.path.exists(os.path.join(home, place, "libcudart_static.a")):
            return os.path.join(home, place)
    raise RuntimeError(f"libcudart_static.a not found under {home}; install the CUDA runtime's development files")


def extension(cpp_extension):
    home = find_cuda()
    # Torch's headers as system headers: their warnings are not ours to fix.
    system = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    cxx = ["-std=c++20", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    cxx += [TORCH_TARGET, "-DTORCH_STABLE_ONLY", *system]
    sources = ["csrc/bindings.cpp", "csrc/checks.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))]
    link = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    arguments = {"cxx": cxx}
    if home is not None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
        cpp_extension.CUDA_HOME = home  # torch leaves it unset when it is a CPU-only build
        sources += sorted(glob.glob("csrc/cuda/*.cpp")) + sorted(glob.glob("csrc/cuda/*.cu"))
        cxx += ["-isystem", os.path.join(home, "include")]
        arguments["nvcc"] = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden"]
        link += [f"-L{cudart_dir(home)}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return cpp_extension.CppExtension(
        "vllm_ddtree._C", sources, py_limited_api=True, extra_compile_args=arguments, extra_link_args=link,
    )  # fmt: skip


def forgiving(base):
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
    if os.environ.get("DDTREE_BUILD_EXT") == "0":
        say("DDTREE_BUILD_EXT=0: no kernels, the package will use its slower reference path")
        return {}
    try:
        from torch.utils import cpp_extension
    except Exception as error:
        if REQUIRED:
            raise
        say(f"torch cannot be imported here ({error}): no kernels. Install with --no-build-isolation to build them")
        return {}
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None and shutil.which("g++") is None:
        if REQUIRED:
            raise SystemExit("vllm-ddtree: DDTREE_REQUIRE_EXT=1 needs a C++20 compiler, found none; install g++")
        say("no C++ compiler found: no kernels, the package will use its slower reference path")
        return {}
    return {
        "ext_modules": [extension(cpp_extension)],
        "cmdclass": {"build_ext": forgiving(cpp_extension.BuildExtension)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**options())
