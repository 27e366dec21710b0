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
from dpofit.train.guard.sources import Staging, as_bytes, held, is_partitioned, overlap, span
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

    Anonymous memory: one chunk for hashing through Python, plus one pinned chunk when weights are on a GPU.
    """
    staging = Staging(job.config.chunk_bytes)
    with _open_files(job) as files:
        for planned in job.plan.tensors:
            mine = held(job.entries[planned.source], job.rank, job.world_size)
            meeting = overlap(planned, mine.start, mine.data.numel())
            if meeting is None:
                continue
            offset, skip, length = meeting
            _write(files(planned.file), offset, mine.data[skip : skip + length], staging, job.progress)
        return files.extents()


def write_routed(job: WeightsJob, group: Any) -> Extents:
    """Rank 0 writes; every other rank sends its slices to it in chunks over `group` (gloo), in plan order.

    For folders that only rank 0's node sees. Anonymous memory: one chunk to send or to receive. A failed write on
    rank 0 is raised only after all chunks have been received, so that senders never hang.
    """
    staging = Staging(job.config.chunk_bytes)
    inbox = torch.empty(job.config.chunk_bytes, dtype=torch.uint8) if job.rank == 0 else None
    failure: BaseException | None = None
    with _open_files(job) as files:
        for planned in job.plan.tensors:
            tensor = job.entries[planned.source]
            if not is_partitioned(tensor):
                if job.rank == 0 and failure is None:
                    data = as_bytes(tensor.detach().contiguous())[planned.source_offset :][: planned.nbytes]
                    failure = _attempt(
                        lambda p=planned, d=data: _write(files(p.file), p.offset, d, staging, job.progress)
                    )
                continue
            for sender in range(job.world_size):
                start, nbytes = span(tensor, sender, job.world_size)
                meeting = overlap(planned, start, nbytes)
                if meeting is None or job.rank not in (0, sender):
                    continue
                offset, skip, length = meeting
                if sender == job.rank:
                    data = held(tensor, sender, job.world_size).data[skip : skip + length]
                    if sender != 0:
                        for chunk in staging.chunks(data):
                            torch.distributed.send(torch.frombuffer(chunk, dtype=torch.uint8), dst=0, group=group)
                    elif failure is None:
                        failure = _attempt(
                            lambda p=planned, o=offset, d=data: _write(files(p.file), o, d, staging, job.progress)
                        )
                    continue
                assert inbox is not None
                file = files(planned.file) if failure is None else None
                received = _receive(inbox, length, sender, group)
                if file is None:
                    for _ in received:
                        pass
                else:
                    failure = _write_received(file, offset, received, job.progress)
        if failure is not None:
            raise failure
        return files.extents()


def write_gather(job: WeightsJob) -> Extents:
    """Gathers one parameter at a time on all ranks; rank 0 writes it. Extra memory: one whole parameter.

    For partitions that lie where the other backends don't look (NVMe, MiCS, quantized).
    """
    import deepspeed

    staging = Staging(job.config.chunk_bytes)
    failure: BaseException | None = None
    by_source: dict[str, list[PlannedTensor]] = {}
    for planned in job.plan.tensors:
        by_source.setdefault(planned.source, []).append(planned)
    with _open_files(job) as files:
        for source, wanted in by_source.items():
            tensor = job.entries[source]
            gathered = deepspeed.zero.GatheredParameters([tensor]) if is_partitioned(tensor) else nullcontext()
            with gathered:
                if job.rank != 0 or failure is not None:
                    continue
                data = as_bytes(tensor.detach().contiguous())
                for planned in wanted:
                    part = data[planned.source_offset :][: planned.nbytes]
                    failure = failure or _attempt(
                        lambda p=planned, d=part: _write(files(p.file), p.offset, d, staging, job.progress)
                    )
                del data
        if failure is not None:
            raise failure
        return files.extents()


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


def _write(file: BoundedFile, offset: int, data: torch.Tensor, staging: Staging, progress: Progress) -> None:
    extent = file.extent(offset)
    for chunk in staging.chunks(data):
        extent.write(chunk)
        progress(chunk.nbytes)
    extent.finish()


def _receive(inbox: torch.Tensor, length: int, sender: int, group: Any) -> Iterator[memoryview]:
    position = 0
    while position < length:
        part = inbox[: min(inbox.numel(), length - position)]
        torch.distributed.recv(part, src=sender, group=group)
        position += part.numel()
        yield memoryview(part.numpy())


def _write_received(file: BoundedFile, offset: int, chunks: Iterator[memoryview], progress: Progress) -> OSError | None:
    extent = file.extent(offset)
    failure: OSError | None = None
    for chunk in chunks:
        if failure is None:
            try:
                extent.write(chunk)
                progress(chunk.nbytes)
            except OSError as error:
                failure = error
    if failure is None:
        extent.finish()
    return failure


def _attempt(action: Callable[[], None]) -> OSError | None:
    try:
        action()
    except OSError as error:
        return error
    return None
