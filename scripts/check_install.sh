#!/usr/bin/env bash
# Installs a wheel as on a machine without a compiler, into an environment of its own, and tries it there.
# It sees torch and vLLM of DDTREE_VENV (scripts/setup.sh); nothing is downloaded.
set -euo pipefail
wheel=$(realpath "${1:?a wheel}")
cd "$(dirname "$0")/.."
venv=${DDTREE_VENV:-$PWD/.venv}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
site() { "$1/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))"; }

"$venv/bin/python" -m venv "$fresh/env"
site "$venv" > "$(site "$fresh/env")/vllm-of-another-environment.pth"
cd "$fresh"
bare() { # run COMMAND... with the programs of that environment only
  env -i PATH="$fresh/env/bin" HOME="$fresh" TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 "$@"
}
for program in c++ g++ gcc cc clang nvcc ninja; do
  if found=$(bare python -c "import shutil; print(shutil.which('$program') or '')") && [ -n "$found" ]; then
    echo "[install] $found is on the PATH that should have no compiler" >&2
    exit 1
  fi
done
bare python -m pip install -q --disable-pip-version-check --no-deps --no-index "$wheel"
bare vllm-ddtree-status
bare python - "$fresh" << 'PYTHON'
import sys
from pathlib import Path

import torch

import vllm_ddtree
from vllm_ddtree import ops, reference

assert Path(vllm_ddtree.__file__).is_relative_to(sys.argv[1]), f"not the wheel's: {vllm_ddtree.__file__}"
assert ops.has_kernels("cpu"), ops.kernels_error("cpu")
assert ops.has_kernels("cuda"), ops.kernels_error("cuda")
ids = torch.arange(4 * 8 * 16).reshape(4, 8, 16)
logps = -torch.rand(4, 8, 16, generator=torch.Generator().manual_seed(0)).cumsum(-1)
budgets = torch.tensor([24, 3, 0, 17], dtype=torch.int32)
wanted = reference.build(logps, ids, budgets, 24)
found = tuple(torch.full_like(part, -7) for part in wanted)
ops.build(logps, ids, budgets, *found)
for name, one, other in zip(("tokens", "parents", "depths", "logws", "counts"), found, wanted, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=lambda text: f"{name}: {text}")
print(f"[install] {vllm_ddtree.__file__}: kernels for CPU and CUDA; a built tree equals the reference")
PYTHON
