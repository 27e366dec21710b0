"""What readers of data files share: a row, how progress is told, and how a file fails to load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[Any, Any]  # keys are column names
Advance = Callable[[int], None]  # told how many bytes of the file were just consumed

LONGEST_ROW_CHARS = 64 << 20  # a row longer than this is taken for a broken one rather than read on and on


class LoadFailure(Exception):
    """The file cannot be loaded at all, by LLaMA-Factory either: where it breaks, why, and what to do."""

    def __init__(self, where: str, why: str, fix: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where, self.why, self.fix = where, why, fix
