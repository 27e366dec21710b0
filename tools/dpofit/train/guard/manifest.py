"""The manifest: what a checkpoint consists of, byte range by byte range, so that "whole" can be checked.

`dpofit-manifest.json` lies in the checkpoint beside the files it lists. No torch here: verify runs on a laptop.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpofit.train.guard.durable import blocks, fsync_folder

MANIFEST_NAME = "dpofit-manifest.json"
SCHEMA = "dpofit.manifest/1"


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of one file that one rank wrote."""

    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: path relative to the checkpoint, its size, and extents that together cover it."""

    path: str
    bytes: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a checkpoint consists of. `step` is None for a final save outside checkpoint-N folders."""

    step: int | None
    world_size: int
    backend: str
    versions: dict[str, str]
    files: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.bytes for entry in self.files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the folder's manifest in one step, durably."""
    document = {"schema": SCHEMA, **asdict(manifest)}
    temporary = folder / f".{MANIFEST_NAME}.new"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST_NAME)
    fsync_folder(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, None if it has none. ValueError when there is one that can't be understood."""
    path = folder / MANIFEST_NAME
    try:
        regular = stat.S_ISREG(path.stat().st_mode)  # one look: another process may move the folder at any moment
        text = path.read_text(encoding="utf-8") if regular else ""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    if not regular:
        raise ValueError(f"{path} is not a file")
    try:
        document: dict[str, Any] = json.loads(text)
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}, this version reads {SCHEMA}")
        return Manifest(
            document["step"], document["world_size"], document["backend"], dict(document["versions"]),
            tuple(_file_entry(entry) for entry in document["files"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} can't be read as a manifest: {error}") from None


def _file_entry(entry: dict[str, Any]) -> FileEntry:
    path, size = entry["path"], entry["bytes"]
    if not isinstance(path, str) or not is_inside(path):
        raise ValueError(f"{path!r} is not a path inside the checkpoint")
    extents = tuple(Extent(**extent) for extent in entry["extents"])
    if type(size) is not int or any(type(n) is not int or n < 0 for e in extents for n in (e.offset, e.length)):
        raise ValueError(f"{path}: sizes and offsets must be whole numbers")
    if any(extent.offset + extent.length > size for extent in extents) or uncovered(extents, size):
        raise ValueError(f"{path}: its extents don't cover its {size} bytes")
    return FileEntry(path, size, extents)


def is_inside(path: str) -> bool:
    """Whether a relative path stays in its folder: no root, no `..`, no NUL."""
    return bool(path) and not os.path.isabs(path) and ".." not in path.split("/") and "\0" not in path


def looks_whole(folder: Path) -> bool:
    """Whether the folder has a manifest and every listed file has its listed size. Reads no data."""
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return False
    if manifest is None:
        return False
    for entry in manifest.files:
        try:
            if (folder / entry.path).stat().st_size != entry.bytes:
                return False
        except OSError:
            return False
    return True


def uncovered(extents: Iterable[Extent], file_bytes: int) -> list[tuple[int, int]]:
    """`(offset, length)` of the runs of a file of `file_bytes` that no extent covers."""
    gaps: list[tuple[int, int]] = []
    position = 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if extent.offset > position:
            gaps.append((position, extent.offset - position))
        position = max(position, extent.offset + extent.length)
    if position < file_bytes:
        gaps.append((position, file_bytes - position))
    return gaps


def hash_range(fd: int, offset: int, length: int) -> Extent:
    """The extent of what lies in the file now; OSError if the file ends before it."""
    digest = hashlib.sha256()
    for block in blocks(fd, offset, length):
        digest.update(block)
    return Extent(offset, length, digest.hexdigest())
