#!/usr/bin/env bash
# Builds dist/vllm_ddtree-*-cp310-abi3-manylinux_2_28_x86_64.whl, CPU and CUDA code in one, and checks it.
# Needs g++ and the torch headers of DDTREE_VENV (scripts/setup.sh), but no CUDA: nvcc 13.0 comes from PyPI.
# Set CUDA_HOME to build with a toolkit of your own, which must have libcudart_static.a.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${DDTREE_VENV:-$root/.venv}/bin/python
tools=$root/.venv-wheel
log=$root/.wheel.log
: > "$log"

# nvcc names its own parts without versions, and parts of two releases don't fit: all five are pinned.
toolkit="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
# cuobjdump has no 13.0 on PyPI; a newer one reads older code.
checkers="auditwheel==6.8.2 abi3audit==0.0.26 wheel==0.45.1 nvidia-cuda-cuobjdump==13.2.78"

step() { printf '[wheel] %s ... ' "$1" >&2; began=$SECONDS; }
done_() { printf 'done (%ss)\n' "$((SECONDS - began))" >&2; }
run() { # run COMMAND..., its output in the log; the log's tail on failure
  if ! "$@" >> "$log" 2>&1; then
    printf 'failed\n' >&2
    grep -v 'is ignored: it is neither' "$log" | tail -n 25 >&2
    echo "[wheel] the whole output is in $log" >&2
    exit 1
  fi
}

if ! "$python" -c "import torch" >> "$log" 2>&1; then
  echo "[wheel] $python can't import torch, whose headers the module needs: run scripts/setup.sh first" >&2
  exit 1
fi

stamp=$tools/.stamp
if [ "$(cat "$stamp" 2> /dev/null)" != "$toolkit $checkers" ]; then
  step "nvcc 13.0 and the checkers from PyPI, in $tools"
  run "${PYTHON:-python3}" -m venv --clear "$tools"
  # shellcheck disable=SC2086  # one word per package
  run "$tools/bin/python" -m pip install -q --disable-pip-version-check $toolkit $checkers
  printf '%s' "$toolkit $checkers" > "$stamp"; done_
fi
cuda=${CUDA_HOME:-$("$tools/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia/cu13}
cudart=$(find -L "$cuda/lib64" "$cuda/lib" -maxdepth 1 -name libcudart_static.a -print -quit 2> /dev/null || true)
if [ ! -x "$cuda/bin/nvcc" ] || [ -z "$cudart" ]; then
  echo "[wheel] $cuda lacks bin/nvcc or libcudart_static.a; unset CUDA_HOME to take both from PyPI" >&2
  exit 1
fi
echo "[wheel] $("$cuda/bin/nvcc" --version | sed -n 's/^Cuda compilation tools, //p'), $cuda" >&2

step "compiling"
rm -rf build/lib* build/bdist* build/wheel  # what an older tree left there would travel along
mkdir -p build/wheel build/cudart
run "$python" scripts/glibc_floor.py "$cudart" build/cudart/libcudart_static.a
run env -u TORCH_CUDA_ARCH_LIST CUDA_HOME="$cuda" DDTREE_BUILD_CUDA=1 DDTREE_REQUIRE_EXT=1 DDTREE_BUILD_EXT=1 \
  LDFLAGS="-L$root/build/cudart ${LDFLAGS:-}" \
  "$python" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --no-index -w build/wheel .
done_

step "tagging and checking"
run "$tools/bin/python" -m wheel tags --remove --platform-tag manylinux_2_28_x86_64 build/wheel/*.whl
rm -f dist/vllm_ddtree-*.whl
mkdir -p dist
mv build/wheel/*.whl dist/
done_
"$tools/bin/python" scripts/check_wheel.py dist/*.whl
