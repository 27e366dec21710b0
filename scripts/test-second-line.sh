#!/usr/bin/env bash
# Test the save guard on the second supported line, transformers 4.57.3: bash scripts/test-second-line.sh [VENV]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-"$root/.venv-second-line"}

bash "$root/scripts/install.sh" "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==4.57.3" "huggingface_hub<1"
cd "$root"
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest tests/guard
