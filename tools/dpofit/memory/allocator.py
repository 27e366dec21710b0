"""Replays allocations through a model of PyTorch's CUDA caching allocator: allocated bytes become reserved bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from dpofit.memory.caching_allocator import CachingAllocator
from dpofit.memory.program import Program

# (storage, size_bytes, stream): an allocation if size_bytes > 0, the free of `storage` if < 0, and if 0 a mark:
# what follows belongs to the phase called `storage`, or, with EMPTY_CACHE as its stream, torch.cuda.empty_cache().
AllocatorEvent = tuple[Hashable, int, str]
EMPTY_CACHE = "empty_cache"


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The peaks while one phase was marked, all its stretches together."""

    phase: Hashable
    allocated_bytes: int
    reserved_bytes: int
    retries: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The first request that could not be met, and the state torch would print with it."""

    storage: Hashable
    size_bytes: int
    phase: Hashable
    allocated_bytes: int
    reserved_bytes: int  # after every cached block that could be released was


@dataclass(frozen=True, slots=True)
class Replay:
    """What a sequence of events did to the allocator; it ends at `out_of_memory`, if that is not None."""

    peak_allocated_bytes: int  # as torch.cuda.max_memory_allocated
    peak_reserved_bytes: int  # as torch.cuda.max_memory_reserved
    allocated_bytes: int
    reserved_bytes: int
    retries: int  # as num_alloc_retries: times all cached memory was given back to meet one request
    segments: int  # cudaMalloc'd segments, or mapped pages of expandable ones, at the end
    out_of_memory: OutOfMemory | None
    phases: tuple[PhasePeak, ...]


def replay(events: Iterable[AllocatorEvent], *, expandable: bool, capacity_bytes: int | None = None) -> Replay:
    """Run `events` through the allocator; `capacity_bytes` is what it may reserve, None for no bound.

    Deterministic. What precedes the first mark counts in the overall peaks only. Raises AssertionError if a
    storage is allocated twice or freed without being alive.
    """
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    malloc, free = allocator.malloc, allocator.free
    phase: Hashable = None
    retries_before = 0
    peaks: dict[Hashable, PhasePeak] = {}
    failed: OutOfMemory | None = None
    for storage, size_bytes, stream in events:
        if size_bytes > 0:
            if not malloc(storage, size_bytes, stream):
                allocated, reserved = allocator.allocated_bytes, allocator.reserved_bytes
                failed = OutOfMemory(storage, size_bytes, phase, allocated, reserved)
                break
        elif size_bytes < 0:
            free(storage)
        elif stream == EMPTY_CACHE:
            allocator.empty_cache()
        else:
            peaks[phase] = _with_stretch(peaks.get(phase), phase, allocator, retries_before)
            allocator.reset_peaks()
            phase, retries_before = storage, allocator.retries
    peaks[phase] = _with_stretch(peaks.get(phase), phase, allocator, retries_before)
    return Replay(
        peak_allocated_bytes=max(peak.allocated_bytes for peak in peaks.values()),
        peak_reserved_bytes=max(peak.reserved_bytes for peak in peaks.values()),
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        retries=allocator.retries,
        segments=allocator.segments,
        out_of_memory=failed,
        phases=tuple(peak for name, peak in peaks.items() if name is not None),
    )


def gpu_events(program: Program) -> Iterator[AllocatorEvent]:
    """The GPU events of a program in order, with a mark `(name, step)` where each phase begins."""
    current = None
    for phase, storage, event in program.events():
        if phase is not current:
            current = phase
            yield (phase.name, phase.step), 0, ""
        if event.space == "gpu":
            yield storage, event.size_bytes, event.stream


def _with_stretch(
    before: PhasePeak | None, phase: Hashable, allocator: CachingAllocator, retries_before: int
) -> PhasePeak:
    """The peaks of `phase` with the stretch that ends here."""
    return PhasePeak(
        phase,
        max(before.allocated_bytes if before else 0, allocator.peak_allocated_bytes),
        max(before.reserved_bytes if before else 0, allocator.peak_reserved_bytes),
        (before.retries if before else 0) + allocator.retries - retries_before,
    )
