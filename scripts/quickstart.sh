#!/usr/bin/env bash
# From a fresh clone to an answer: installs the light package (no torch) and compares the Qwen2.5-72B recipes.
#   bash scripts/quickstart.sh [--gpu a100-80g --nodes 8 --host-ram 1000GiB ...]   flags go to both commands
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $python is older than 3.11; set PYTHON to a newer one" >&2
  exit 2
}
if [ ! -x "$venv/bin/dpofit" ]; then
  echo "Installing dpofit into $venv ..."
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$root"
fi
"$venv/bin/dpofit" compare qwen2.5-72b-dpo "$@"
echo
"$venv/bin/dpofit" limits qwen2.5-72b-dpo "$@" || true # exit 1: some recipe fits at no length
echo
echo "Next: $venv/bin/dpofit --help, and README.md"
