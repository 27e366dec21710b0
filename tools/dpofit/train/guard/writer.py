"""Writes bytes at offsets of files while keeping dirty pages, page cache and anonymous memory bounded."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dpofit.train.guard.manifest import Extent

_SYNC_WAIT_BEFORE, _SYNC_WRITE, _SYNC_WAIT_AFTER = 1, 2, 4  # linux/fs.h SYNC_FILE_RANGE_*
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class _Span:
    offset: int
    length: int


class BoundedFile:
    """One file open for positioned writes. `close` makes it durable; every write becomes an `Extent` with its sha256.

    At most two windows of `window_bytes` are dirty or in flight; a third may be filling. Written-out pages are
    dropped, so a save of any size leaves the page cache of the training node as it was.
    """

    def __init__(self, root: Path, relative: str, window_bytes: int, create: bool = True) -> None:
        self.relative = relative
        self.extents: list[Extent] = []
        self._window_bytes = window_bytes
        self._filling: list[_Span] = []
        self._in_flight: deque[list[_Span]] = deque()
        self._filled = 0
        flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(root / relative, flags, 0o666)

    def __enter__(self) -> BoundedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Close without writing anything out: the file is about to be deleted."""
        os.close(self._fd)

    def extent(self, offset: int) -> _ExtentWriter:
        """A writer for one run of bytes beginning at `offset`; its checksum is computed as it is written."""
        return _ExtentWriter(self, offset)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`, however short the single writes come back."""
        view = memoryview(data).cast("B")
        start = offset
        while view.nbytes:
            written = os.pwrite(self._fd, view, offset)
            if written <= 0:
                raise OSError(errno.EIO, "write returned no bytes", self.relative)
            view, offset = view[written:], offset + written
        self._track(start, offset - start)

    def close(self) -> None:
        """Write everything out, fsync, drop the pages, close."""
        try:
            if self._filling:
                self._in_flight.append(self._filling)
                self._filling = []
            os.fsync(self._fd)
            while self._in_flight:
                self._drop(self._in_flight.popleft())
        finally:
            os.close(self._fd)

    def _track(self, offset: int, length: int) -> None:
        last = self._filling[-1] if self._filling else None
        if last and last.offset + last.length == offset:
            self._filling[-1] = _Span(last.offset, last.length + length)
        else:
            self._filling.append(_Span(offset, length))
        self._filled += length
        if self._filled < self._window_bytes:
            return
        for span in self._filling:
            _sync_range(self._fd, span, _SYNC_WRITE)  # start, don't wait
        self._in_flight.append(self._filling)
        self._filling, self._filled = [], 0
        if len(self._in_flight) > 1:
            oldest = self._in_flight.popleft()
            for span in oldest:
                _sync_range(self._fd, span, _SYNC_WAIT_BEFORE | _SYNC_WRITE | _SYNC_WAIT_AFTER)
            self._drop(oldest)

    def _drop(self, spans: list[_Span]) -> None:
        for span in spans:
            with suppress(OSError):  # advice only: a file system may not support it
                os.posix_fadvise(self._fd, span.offset, span.length, os.POSIX_FADV_DONTNEED)


class _ExtentWriter:
    """Appends chunks to one extent of a BoundedFile; `finish` records offset, length and sha256."""

    def __init__(self, file: BoundedFile, offset: int) -> None:
        self._file, self._start, self._position = file, offset, offset
        self._hash = hashlib.sha256()

    def write(self, chunk: memoryview | bytes) -> None:
        self._hash.update(chunk)
        self._file.write(chunk, self._position)
        self._position += memoryview(chunk).nbytes

    def finish(self) -> None:
        self._file.extents.append(Extent(self._start, self._position - self._start, self._hash.hexdigest()))


def _sync_range(fd: int, span: _Span, flags: int) -> None:
    result = _libc.sync_file_range(fd, ctypes.c_int64(span.offset), ctypes.c_int64(span.length), flags)
    if result == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM):
        os.fdatasync(fd)  # a file system or sandbox without the call: slower, same bound
        return
    raise OSError(code, os.strerror(code))
