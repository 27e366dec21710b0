"""The three ways planned weights reach their files without anyone holding the model: direct, routed, gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpofit.train.guard.config import GuardConfig
from dpofit.train.guard.manifest import Extent
from dpofit.train.guard.plan import Plan, PlannedTensor
from dpofit.train.guard.sources import Staging, as_bytes, held, host_view, is_partitioned, overlap, span
from dpofit.train.guard.writer import BoundedFile

Entries = Mapping[str, torch.Tensor]
Extents = dict[str, list[Extent]]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WeightsJob:
    """What every backend needs: the plan, this rank's tensors, and where the files lie."""

    plan: Plan
    entries: Entries
    folder: Path
    config: GuardConfig
    rank: int
    world_size: int
    progress: Progress = lambda nbytes: None


def write_direct(job: WeightsJob) -> Extents:
    """Each rank writes its own slices into the final files, which rank 0 has already sized. No communication.

    Anonymous memory: one pinned chunk when weights are on a GPU, nothing when they are on the host.
    """
    with _open_files(job) as files:
        sink = _Sink(files, Staging(job.config.chunk_bytes), job.progress)
        for planned in job.plan.tensors:
            mine = held(job.entries[planned.source], job.rank, job.world_size)
            meeting = overlap(planned, mine.start, mine.data.numel())
            if meeting is not None:
                offset, skip, length = meeting
                sink.write(planned.file, offset, mine.data[skip : skip + length])
                sink.raise_failure()
        return files.extents()


def write_routed(job: WeightsJob, group: Any) -> Extents:
    """Rank 0 writes; every other rank sends its slices to it in chunks over `group` (gloo), in plan order.

    For folders that only rank 0's node sees. Anonymous memory: one chunk to send or to receive. A failed write on
    rank 0 is raised only after all chunks have been received, so that senders never hang.
    """
    staging = Staging(job.config.chunk_bytes)
    inbox = torch.empty(job.config.chunk_bytes if job.rank == 0 else 0, dtype=torch.uint8)
    with _open_files(job) as files:
        sink = _Sink(files, staging, job.progress)
        for planned in job.plan.tensors:
            tensor = job.entries[planned.source]
            if not is_partitioned(tensor):
                if job.rank == 0:
                    sink.write(planned.file, planned.offset, _part(as_bytes(tensor.detach().contiguous()), planned))
                continue
            for sender in range(job.world_size):
                meeting = overlap(planned, *span(tensor, sender, job.world_size))
                if meeting is None:
                    continue
                offset, skip, length = meeting
                if job.rank == 0 and sender != 0:
                    sink.write_chunks(planned.file, offset, _receive(inbox, length, sender, group))
                elif job.rank == sender:
                    data = held(tensor, sender, job.world_size).data[skip : skip + length]
                    if sender == 0:
                        sink.write(planned.file, offset, data)
                    else:
                        for chunk in staging.chunks(data):
                            torch.distributed.send(torch.frombuffer(chunk, dtype=torch.uint8), dst=0, group=group)
        sink.raise_failure()
        return files.extents()


def write_gather(job: WeightsJob) -> Extents:
    """Gathers one parameter at a time on all ranks; rank 0 writes it. Extra memory: one whole parameter.

    For partitions that lie where the other backends don't look (NVMe, MiCS, quantized).
    """
    from deepspeed.runtime.zero import GatheredParameters

    by_source: dict[str, list[PlannedTensor]] = {}
    for planned in job.plan.tensors:
        by_source.setdefault(planned.source, []).append(planned)
    with _open_files(job) as files:
        sink = _Sink(files, Staging(job.config.chunk_bytes), job.progress)
        for source, wanted in by_source.items():
            tensor = job.entries[source]
            with GatheredParameters([tensor]) if is_partitioned(tensor) else nullcontext():
                if job.rank == 0:
                    data = as_bytes(tensor.detach().contiguous())
                    for planned in wanted:
                        sink.write(planned.file, planned.offset, _part(data, planned))
                    del data
        sink.raise_failure()
        return files.extents()


def _part(data: torch.Tensor, planned: PlannedTensor) -> torch.Tensor:
    return data[planned.source_offset : planned.source_offset + planned.nbytes]


class _Files:
    """The job's files, one open at a time: plans are in file order, and the page-cache windows are per file."""

    def __init__(self, job: WeightsJob) -> None:
        self._job = job
        self._index: int | None = None
        self._file: BoundedFile | None = None
        self._extents: Extents = {}

    def __call__(self, index: int) -> BoundedFile:
        if index != self._index or self._file is None:
            self.close()
            job = self._job
            self._file = BoundedFile(job.folder, job.plan.files[index], job.config.window_bytes, create=False)
            self._index = index
        return self._file

    def close(self) -> None:
        """Make the open file durable and keep its extents."""
        file, self._file = self._file, None
        if file is not None:
            self._extents.setdefault(file.relative, []).extend(file.extents)
            file.close()

    def abandon(self) -> None:
        """Close without caring for durability: the save has failed."""
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def extents(self) -> Extents:
        self.close()
        return self._extents


@contextmanager
def _open_files(job: WeightsJob) -> Iterator[_Files]:
    files = _Files(job)
    try:
        yield files
    finally:
        files.abandon()


class _Sink:
    """Writes until the first failure and remembers it: ranks that share collectives must all go through them."""

    def __init__(self, files: _Files, staging: Staging, progress: Progress) -> None:
        self._files, self._staging, self._progress = files, staging, progress
        self._failure: OSError | None = None

    def write(self, file: int, offset: int, data: torch.Tensor) -> None:
        """Write a flat uint8 tensor at `offset` of the plan's `file`."""
        self.write_chunks(file, offset, self._staging.chunks(data))

    def write_chunks(self, file: int, offset: int, chunks: Iterator[memoryview]) -> None:
        """The same from chunks, all of which are taken, even after a failure."""
        extent = None
        for chunk in chunks:
            if self._failure is not None:
                continue
            try:
                extent = extent or self._files(file).extent(offset)
                extent.write(chunk)
                self._progress(chunk.nbytes)
            except OSError as error:
                self._failure = error
        if extent is not None and self._failure is None:
            extent.finish()

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure


def _receive(inbox: torch.Tensor, length: int, sender: int, group: Any) -> Iterator[memoryview]:
    position = 0
    while position < length:
        part = inbox[: min(inbox.numel(), length - position)]
        torch.distributed.recv(part, src=sender, group=group)
        position += part.numel()
        yield host_view(part)
