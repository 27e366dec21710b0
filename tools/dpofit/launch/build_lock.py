"""Finds locks that killed builds of DeepSpeed's operators left behind: torch's loader would wait for them forever."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_LOCK = "lock"  # torch/utils/cpp_extension.py: FileBaton(build_directory / "lock"), held open while building


def operator_cache(environment: Mapping[str, str]) -> Path:
    """Where torch keeps compiled operators."""
    return Path(environment.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


def left_locks(cache: Path) -> tuple[Path, ...]:
    """Lock files in the cache that no process of ours holds open."""
    locks = [path for depth in ("*", "*/*") for path in cache.glob(f"{depth}/{_LOCK}")]
    if not locks:
        return ()
    held = _open_files()
    return tuple(lock for lock in locks if str(lock.resolve()) not in held)


def remove_left_locks(cache: Path) -> tuple[Path, ...]:
    """Remove them; returns which."""
    removed = left_locks(cache)
    for lock in removed:
        lock.unlink(missing_ok=True)
    return removed


def _open_files() -> set[str]:
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(os.readlink(descriptor))
        except OSError:  # gone, or another user's
            continue
    return found
