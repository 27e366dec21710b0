"""Reserved GPU bytes: the program's events, over a mix of lengths, through a model of the caching allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpofit.memory.allocator import EMPTY_CACHE, AllocatorEvent, replay
from dpofit.memory.program import Program
from dpofit.memory.unroll import requests


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the allocator would hold. A retry: cudaMalloc failed, cached memory was given back, it was tried again.
    `out_of_memory`: not even that helped, at some step of the mix."""

    peak_bytes: int
    phases: dict[str, int]
    retries_per_step: float
    out_of_memory: bool


def reserved(
    program: Program, mix: Sequence[Program], *, expandable: bool, capacity_bytes: int | None,
    emptied_before: frozenset[str] = frozenset(),
) -> Reserved:  # fmt: skip
    """Replay a run whose longest rows are `program`'s. They come last: segments that shorter batches left behind are
    too small for them, which is what fragments a run (longest first, everything later fits what is there).

    `mix`: the shorter batches as they come. The first is a whole program, since what lives across steps belongs to its
    load, init and first step; the others are steady steps. Empty: `program` whole, alone. `emptied_before`: phases of
    each step at whose beginning the cache is emptied.
    """
    events = _events(program, mix, whole=not expandable, emptied_before=emptied_before)
    run = replay(events, expandable=expandable, capacity_bytes=capacity_bytes)
    phases: dict[str, int] = {}
    for phase in run.phases:
        if phase.phase is not None:
            name = str(phase.phase)
            phases[name] = max(phases.get(name, 0), phase.reserved_bytes)
    steps = len(mix) + 2  # a whole program has two
    return Reserved(run.peak_reserved_bytes, phases, run.retries / steps, run.out_of_memory is not None)


def _events(
    program: Program, mix: Sequence[Program], whole: bool, emptied_before: frozenset[str]
) -> Iterator[AllocatorEvent]:
    """`whole`: every layer of the steps that make most segments, the first one and that of the longest rows. Where
    segments don't grow, a layer's output is cut from blocks that its neighbours' temporaries left."""
    opening, later = (mix[0], mix[1:]) if mix else (program, ())
    for phase in opening.phases:
        if mix and phase.name in ("eval", "save"):
            continue  # once, at the end, with the longest rows
        if phase.name in emptied_before:
            yield "", 0, EMPTY_CACHE
        yield phase.name, 0, ""
        yield from requests(phase, whole=whole and phase.step <= 1)
    if not mix:
        return
    longest = Program(tuple(phase for phase in program.phases if phase.step == 2))
    for number, step in enumerate([*later, longest]):
        for phase in step.phases:
            if phase.name in emptied_before:
                yield "", 0, EMPTY_CACHE
            yield phase.name, 0, ""
            yield from requests(phase, f"{number}.", whole=whole and step is longest)
