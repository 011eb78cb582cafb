#!/usr/bin/env bash
# Sets up, then shows the main job: a server that drafts trees, against no speculation and the chain.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
. scripts/env.sh
exec python scripts/demo.py "$@"
