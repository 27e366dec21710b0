"""Shared by the long-context tests."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])  # the fork server imports tests.guard
)
