"""The one representation of memory use: phases of alloc and free events, with repeats for identical layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Space = Literal["gpu", "host_pinned", "host_pageable", "disk"]
PHASES = (
    "load", "init", "forward", "reference_forward", "loss", "backward", "accumulate", "optimizer_step", "eval", "save",
)  # fmt: skip


class Event(NamedTuple):
    """One alloc (`size_bytes` > 0) or free (`size_bytes` < 0, the same magnitude) of the storage named `tag`.

    Inside a Repeat the storage is `tag` of that iteration plus `shift` (a layer's output is the next one's input).
    `stream` names the allocator pool it comes from:
    segments belong to the stream that asked for them.
    """

    tag: str
    size_bytes: int
    category: str
    space: Space = "gpu"
    stream: str = "compute"
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """`events` once for each layer index from `first` on, `times` times; `reverse` counts down from `first`."""

    events: tuple[Event, ...]
    times: int
    first: int = 0
    reverse: bool = False

    def indices(self) -> range:
        if self.reverse:
            return range(self.first, self.first - self.times, -1)
        return range(self.first, self.first + self.times)


@dataclass(frozen=True, slots=True)
class Phase:
    """A named stretch of a run; `step` 0 is before training, 1 the first step, 2 the steady state."""

    name: str
    step: int
    items: tuple[Event | Repeat, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Phases in the order they happen."""

    phases: tuple[Phase, ...]

    def events(self) -> Iterator[tuple[Phase, str, Event]]:
        """Every event in order, repeats unrolled, as (phase, unique storage id, event)."""
        for phase in self.phases:
            for item in phase.items:
                if isinstance(item, Event):
                    yield (
                        phase,
                        item.tag,
                        item,
                    )  # a layer's storage, seen from outside a repeat, is "tag#index"
                    continue
                for index in item.indices():
                    for event in item.events:
                        yield phase, f"{event.tag}#{index + event.shift}", event

    def check(self) -> None:
        """Assert that every free frees a live storage of the same size, and nothing is allocated twice."""
        live: dict[str, int] = {}
        for phase, storage, event in self.events():
            if event.size_bytes > 0:
                assert storage not in live, f"{phase.name}: {storage} is alive already"
                live[storage] = event.size_bytes
            else:
                size_bytes = live.pop(storage, None)
                assert size_bytes == -event.size_bytes, f"{phase.name}: free of {storage}: {size_bytes}"
