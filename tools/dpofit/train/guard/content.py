"""Reads a checkpoint's bytes once, on all cores: sha256 of the manifest, CRC-32 of torch's files, holes of zeros.

hashlib, zlib and the reads themselves let go of the interpreter lock, so threads are enough.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpofit.train.guard.durable import blocks, read_once
from dpofit.train.guard.manifest import hash_range

_HOLE_BYTES = 1 << 16  # a run of zeros this long inside a weight matrix doesn't come from training
_STEP_BYTES = _HOLE_BYTES // 2  # any such run covers one whole step
_PROBE = bytes(64)
_STEP = bytes(_STEP_BYTES)
_LOCAL_HEADER_BYTES = 30  # of a zip record (APPNOTE.TXT 4.3.7), before its name and extra field

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """`length` bytes at `offset` of `path`, to be compared with `expected` or searched for zeros."""

    path: Path
    label: str  # what these bytes are, for people
    offset: int
    length: int
    kind: Literal["sha256", "crc32", "zeros"]
    expected: str | int = ""


def problems(tasks: Iterable[Task], progress: Progress) -> Iterator[tuple[Task, str]]:
    """Each task that failed, with what was found instead; an unreadable range fails too."""
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        pending = list(tasks)
        for task, problem in zip(pending, pool.map(_problem, pending), strict=True):
            progress(task.length)
            if problem is not None:
                yield task, problem


def torch_records(path: Path) -> list[Task]:
    """One task a record of a `torch.save` file that has a CRC. ValueError when it isn't whole.

    Files from before torch 1.6 are bare pickles and have none; the guard's have none for storages (torch_file.py).
    """
    with path.open("rb") as file:
        magic = file.read(4)
        if magic[:1] == b"\x80":
            return []
        if magic != b"PK\x03\x04":
            raise ValueError("is empty" if not magic else "is not a torch file: its first bytes are wrong")
        try:
            with zipfile.ZipFile(file) as archive:
                return [
                    Task(path, record.filename, _data_offset(file.fileno(), record), record.file_size, "crc32",
                         record.CRC)
                    for record in archive.infolist()
                    if record.CRC and record.compress_type == zipfile.ZIP_STORED
                ]  # fmt: skip
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(f"is cut short or damaged ({error})") from None


def could_hold_zeros(name: str) -> bool:
    """Unused rows of a vocabulary, and LoRA's second factor before its first step, are zeros without any fault."""
    return any(part in name for part in ("embed", "lm_head", "wte", "lora_B"))


def _data_offset(fd: int, record: zipfile.ZipInfo) -> int:
    header = os.pread(fd, _LOCAL_HEADER_BYTES, record.header_offset)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no record at byte {record.header_offset:,}")
    names, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return record.header_offset + _LOCAL_HEADER_BYTES + names + extra


def _problem(task: Task) -> str | None:
    try:
        with read_once(task.path, task.offset, task.length) as fd:
            if task.kind == "zeros":
                return _hole(fd, task)
            if task.kind == "crc32":
                return _wrong_crc(fd, task)
            actual = hash_range(fd, task.offset, task.length).sha256
    except OSError as error:
        return f"{task.label}: unreadable ({error})"
    if actual == task.expected:
        return None
    return f"{task.label}: sha256 {actual[:16]}…, saved {str(task.expected)[:16]}…"


def _wrong_crc(fd: int, task: Task) -> str | None:
    value = 0
    for block in blocks(fd, task.offset, task.length):
        value = zlib.crc32(block, value)
    return None if value == task.expected else f"{task.label}: CRC {value:08x}, saved {task.expected:08x}"


def _hole(fd: int, task: Task) -> str | None:
    position = task.offset
    for block in blocks(fd, task.offset, task.length):
        for start in range(0, block.nbytes - _STEP_BYTES + 1, _STEP_BYTES):
            if block[start : start + len(_PROBE)] == _PROBE and block[start : start + _STEP_BYTES] == _STEP:
                before = len(bytes(block[:start]).rstrip(b"\0"))
                return f"{task.label}: zeros from byte {position + before:,} on"
        position += block.nbytes
    return None
