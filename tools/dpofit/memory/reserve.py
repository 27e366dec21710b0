"""Reserved GPU bytes: the program's events, over a mix of lengths, through a model of the caching allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpofit.memory.allocator import AllocatorEvent, replay
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


def reserved(program: Program, mix: Sequence[Program], *, expandable: bool, capacity_bytes: int | None) -> Reserved:
    """Replay the whole program, then one steady step of each length in `mix`, then its own steady step again.

    `program` is the longest rows' one; what lives across steps belongs to its load, init and first step.
    """
    run = replay(_events(program, mix), expandable=expandable, capacity_bytes=capacity_bytes)
    phases: dict[str, int] = {}
    for phase in run.phases:
        if phase.phase is not None:
            name = str(phase.phase)
            phases[name] = max(phases.get(name, 0), phase.reserved_bytes)
    steps = 3 + len(mix) if mix else 2
    return Reserved(run.peak_reserved_bytes, phases, run.retries / steps, run.out_of_memory is not None)


def _events(program: Program, mix: Sequence[Program]) -> Iterator[AllocatorEvent]:
    for phase in program.phases:
        yield phase.name, 0, ""
        yield from requests(phase)
    if not mix:
        return
    again = Program(tuple(phase for phase in program.phases if phase.step == 2 and phase.name not in ("eval", "save")))
    for number, step in enumerate([*mix, again]):
        for phase in step.phases:
            yield phase.name, 0, ""
            yield from requests(phase, f"{number}.")
