"""Closes a staged folder: all ranks' checksums together, every remaining file hashed, everything durable."""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import asdict
from pathlib import Path

from dpofit.train.guard.durable import fsync_folder, read_once
from dpofit.train.guard.manifest import (
    MANIFEST_NAME,
    Extent,
    FileEntry,
    Manifest,
    hash_range,
    read_manifest,
    uncovered,
    write_manifest,
)

_PART = ".dpofit-part"
_EXTENT_BYTES = 256 << 20  # of files that no rank has hashed: verify then checks one file on several cores


def leave_part(folder: Path, rank: int, extents: dict[str, list[Extent]]) -> None:
    """Leave `rank`'s extents in the folder for its leader. Through the folder: it may be on another node's disk."""
    rows = {path: [asdict(extent) for extent in found] for path, found in extents.items()}
    with (folder / f"{_PART}.{rank}").open("w", encoding="utf-8") as file:
        json.dump(rows, file)
        file.flush()
        os.fsync(file.fileno())


def seal(folder: Path, step: int | None, world_size: int, backend: str) -> Manifest:
    """Write the folder's manifest: extents that ranks left, and a hash of every byte that no rank accounts for."""
    written: dict[str, list[Extent]] = {}
    for part in sorted(folder.glob(f"{_PART}.*")):
        for path, rows in json.loads(part.read_text(encoding="utf-8")).items():
            written.setdefault(path, []).extend(Extent(**row) for row in rows)
        part.unlink()
    entries = tuple(_entry(folder, path, written.get(path, [])) for path in listed_files(folder))
    missing = set(written) - {entry.path for entry in entries}
    if missing:
        raise FileNotFoundError(f"written but gone: {', '.join(sorted(missing))}")
    for directory, _, _ in os.walk(folder):
        fsync_folder(Path(directory))
    manifest = Manifest(step, world_size, backend, _versions(), entries)
    write_manifest(folder, manifest)
    return manifest


def extend(folder: Path, before: dict[str, tuple[int, int]]) -> None:
    """Bring the manifest up to date with files that callbacks added or rewrote since `before` (see `stamps`)."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    now = stamps(folder)
    if now == before:
        return
    known = {entry.path: entry for entry in manifest.files}
    entries = []
    for path in sorted(now):
        unchanged = path in known and before.get(path) == now[path]
        entries.append(known[path] if unchanged else _entry(folder, path, []))
    write_manifest(
        folder, Manifest(manifest.step, manifest.world_size, manifest.backend, manifest.versions, tuple(entries))
    )


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """`path → (size, mtime)` of every file that a manifest would list."""
    found = {}
    for path in listed_files(folder):
        status = (folder / path).stat()
        found[path] = (status.st_size, status.st_mtime_ns)
    return found


def listed_files(folder: Path) -> list[str]:
    """Relative paths of all files in the folder, but for our own temporaries, the manifest and the model card.

    Nothing loads the card, and LLaMA-Factory writes it anew after the final save (dpo/workflow.py:104).
    """
    found = []
    for directory, _, names in os.walk(folder):
        for name in names:
            if (
                name not in (MANIFEST_NAME, "README.md")
                and not name.startswith(".dpofit-")
                and not name.startswith(f".{MANIFEST_NAME}")
            ):
                found.append(os.path.relpath(os.path.join(directory, name), folder))
    return sorted(found)


def _entry(folder: Path, path: str, extents: list[Extent]) -> FileEntry:
    with read_once(folder / path) as fd:
        size = os.fstat(fd).st_size
        gaps = uncovered(extents, size)
        rest = [
            hash_range(fd, start, min(_EXTENT_BYTES, offset + length - start))
            for offset, length in gaps
            for start in range(offset, offset + length, _EXTENT_BYTES)
        ]
        if rest or not extents:
            os.fsync(fd)
    return FileEntry(path, size, tuple(sorted([*extents, *rest], key=lambda extent: extent.offset)))


def _versions() -> dict[str, str]:
    found = {}
    for name in ("dpofit", "torch", "transformers", "deepspeed", "safetensors", "peft", "llamafactory"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
