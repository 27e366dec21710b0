#!/usr/bin/env bash
# Install the pinned training stack and dpofit into a virtual environment: bash scripts/install.sh [VENV]
# Run again it does nothing, unless the pins have changed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-"$root/.venv"}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $python is older than 3.11; set PYTHON to a newer one" >&2
  exit 2
}
pins=$(cat "$root/requirements.txt" "$root/pyproject.toml" | sha256sum | cut -d' ' -f1)
if [ -f "$venv/.dpofit-pins" ] && [ "$(cat "$venv/.dpofit-pins")" = "$pins" ]; then
  exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt" \
  -e "$root[plot,data,test]"
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
  # A CPU build of torch: torchvision's operators do not register against it, which breaks transformers' imports,
  # and torchaudio's libraries look for CUDA's. Neither is needed to train a language model.
  "$venv/bin/python" -m pip uninstall --quiet --yes torchvision
  rm -f "$venv"/lib/python3*/site-packages/torchaudio/lib/*.so
fi
echo "$pins" >"$venv/.dpofit-pins"
