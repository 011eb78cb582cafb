#!/usr/bin/env bash
# Sets up, then lint, types and tests. Arguments go to pytest: scripts/test.sh --slow, -k greedy, ...
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
. scripts/env.sh
ruff check .
ruff format --check .
clang-format --dry-run -Werror $(git ls-files 'csrc/*')
mypy
exec python -m pytest -q "$@"
