"""The one representation of memory use: phases of alloc and free events, with repeats for identical layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Space = Literal["gpu", "host_pinned", "host_pageable", "disk"]
PHASES = (
    "load", "init", "forward", "reference_forward", "loss", "backward", "accumulate", "optimizer_step", "eval", "save",
)  # fmt: skip


class Event(NamedTuple):
    """One alloc (`size_bytes` > 0) or free (`size_bytes` < 0, the same magnitude) of the storage named `tag`.

    Inside a Repeat the storage is `tag` of that iteration. `stream` names the allocator pool it comes from:
    segments belong to the stream that asked for them.
    """

    tag: str
    size_bytes: int
    category: str
    space: Space = "gpu"
    stream: str = "compute"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`events` happen `times` times; `reverse` walks iterations last to first (backward over layers)."""

    events: tuple[Event, ...]
    times: int
    reverse: bool = False


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
                    yield phase, item.tag, item
                    continue
                for index in range(item.times):
                    iteration = item.times - 1 - index if item.reverse else index
                    for event in item.events:
                        yield phase, f"{event.tag}#{iteration}", event


@dataclass
class ProgramBuilder:
    """Writes a Program; asserts that what is freed was allocated, and with which size."""

    _phases: list[Phase] = field(default_factory=list)
    _items: list[Event | Repeat] = field(default_factory=list)
    _repeat: list[Event] | None = None
    _live: dict[tuple[str, int | None], Event] = field(default_factory=dict)
    _times: int | None = None

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        assert name in PHASES and not self._items
        yield
        self._phases.append(Phase(name, step, tuple(self._items)))
        self._items = []

    @contextmanager
    def repeat(self, times: int, reverse: bool = False) -> Iterator[None]:
        assert self._repeat is None, "repeats do not nest"
        self._repeat, self._times = [], times
        yield
        if times and self._repeat:
            self._items.append(Repeat(tuple(self._repeat), times, reverse))
        self._repeat = self._times = None

    def alloc(self, tag: str, size_bytes: int, category: str, space: Space = "gpu", stream: str = "compute") -> None:
        if size_bytes <= 0:
            return
        key = (tag, self._times)
        assert key not in self._live, f"{tag} is alive already"
        event = Event(tag, size_bytes, category, space, stream)
        self._live[key] = event
        self._emit(event)

    def free(self, *tags: str) -> None:
        """Free storages by tag; one that was never allocated because its size is 0 is passed over."""
        for tag in tags:
            event = self._live.pop((tag, self._times), None)
            if event is not None:
                self._emit(event._replace(size_bytes=-event.size_bytes))

    def alive(self, tag: str) -> bool:
        return (tag, self._times) in self._live

    def build(self) -> Program:
        assert not self._items and self._repeat is None
        return Program(tuple(self._phases))

    def _emit(self, event: Event) -> None:
        if self._repeat is not None:
            self._repeat.append(event)
        else:
            self._items.append(event)
