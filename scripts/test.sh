#!/usr/bin/env bash
# Install what the tests need and run them: bash scripts/test.sh [--all] [pytest arguments]
# --all runs the full matrices too (hours); of everything it writes benchmarks/results/tests-all.json.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DPOFIT_TEST_VENV:-"$root/.venv-test"}
cd "$root"

bash scripts/install.sh "$venv"
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1
if [ "${1:-}" = --all ]; then
  shift
  export DPOFIT_TEST_ALL=1
fi
ruff check .
ruff format --check .
mypy
if [ $# -gt 0 ]; then
  pytest "$@"
  exit
fi
if [ -n "${DPOFIT_TEST_ALL:-}" ]; then
  reports=$(mktemp -d)
  trap 'python benchmarks/tests_all.py "$reports"/*.xml >benchmarks/results/tests-all.json; rm -r "$reports"' EXIT
fi
# In the order of the folders: by their number of tests, the longest files, which have few, would come last.
pytest -n 2 --dist loadfile --no-loadscope-reorder ${reports:+--junitxml="$reports/all.xml"} tests
