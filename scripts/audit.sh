#!/usr/bin/env bash
# Known vulnerabilities of what is installed in SITE-PACKAGES, by pip-audit in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=$PWD/.venv-audit
if [ ! -x "$tool/bin/pip-audit" ]; then
  python3 -m venv "$tool"
  "$tool/bin/pip" install -q --disable-pip-version-check pip-audit
fi
# A package index without the vulnerability service answers for no package: one line instead of hundreds.
"$tool/bin/pip-audit" --progress-spinner off --path "${1:?a site-packages folder}" 2>&1 \
  | awk '/could not be audited/ { n++; next } { print } END { if (n) print n " packages could not be audited" }'
