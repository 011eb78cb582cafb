#!/usr/bin/env bash
# Sets up, then lint, types and tests. Arguments go to pytest: scripts/test.sh --slow, -k greedy, ...
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
. scripts/env.sh
say() { printf '[test] %s\n' "$1" >&2; }
say "ruff"
ruff check .
ruff format --check .
say "clang-format"
find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' | xargs clang-format --dry-run -Werror
say "mypy"
mypy
if [ "${CI:-}" = true ]; then
  say "pip-audit: a report, which fails nothing"
  site=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  timeout 30 bash scripts/audit.sh "$site" || say "pip-audit: findings above, or no answer within 30 s"
fi
say "pytest (the first engine test takes a minute)"
# Triton's interpreter uses one core: two files at a time. -n 0 runs them one after the other.
exec python -m pytest -q -n 2 --dist loadfile "$@"
