"""Small file operations that must survive a power cut or leave no page cache behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def fsync_folder(path: Path) -> None:
    """Make names created, renamed or removed in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def read_once(path: Path, offset: int = 0, length: int = 0) -> Iterator[int]:
    """A descriptor for one sequential read, of a range or of all (length 0), that leaves no pages of it behind."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_SEQUENTIAL)
        yield fd
        with suppress(OSError):
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def blocks(fd: int, offset: int, length: int, block_bytes: int = 1 << 20) -> Iterator[memoryview]:
    """The range in pieces of `block_bytes`, each valid until the next; OSError if the file ends before it.

    One buffer for all, small enough to stay in a core's cache between the copy and what reads it.
    """
    buffer = memoryview(bytearray(min(block_bytes, length)))
    position, end = offset, offset + length
    while position < end:
        wanted = min(block_bytes, end - position)
        filled = 0
        while filled < wanted:
            count = os.preadv(fd, [buffer[filled:wanted]], position + filled)
            if count <= 0:
                raise OSError(f"file ends at byte {position + filled}, expected {end}")
            filled += count
        yield buffer[:wanted]
        position += wanted
