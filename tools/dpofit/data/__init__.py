"""Checks a preference dataset as LLaMA-Factory will read it: format, lengths, quality. Needs the `data` extra."""

from __future__ import annotations

import importlib.util

from dpofit.errors import BadInput, Problem

# The modules of the `data` extra, by the name they are imported under.
EXTRA = ("numpy", "pyarrow", "rapidfuzz", "tokenizers", "datasketch")


def require_extra() -> None:
    """Raise BadInput, naming what is missing, unless the `data` extra is installed."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(
            Problem(
                where="dpofit data",
                key=None,
                wrong=f"needs packages that are not installed: {', '.join(missing)}",
                right="Run, in dpofit's repository: pip install -e '.[data]'",
            )
        )
