"""Turns a program's GPU events into the short list the allocator replay reads: middle layers give only what outlives
them, since their temporaries reuse the blocks of the first layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dpofit.memory.program import Event, Phase, Repeat

WHOLE = 1  # layers written out whole at either end of a repeat; 6 gives reserved bytes within 0.3% of it


class Request(NamedTuple):
    """What the allocator sees: the storage, its bytes (negative: freed), the stream."""

    storage: str
    size_bytes: int
    stream: str


def requests(phase: Phase, namespace: str = "") -> Iterator[Request]:
    """The phase's GPU requests, layers collapsed. `namespace` tells storages of different steps apart."""
    for item in phase.items:
        if isinstance(item, Event):
            if item.space == "gpu":
                yield Request(namespace + item.tag, item.size_bytes, item.stream)
        else:
            yield from _repeat(item, namespace)


def _repeat(item: Repeat, namespace: str) -> Iterator[Request]:
    events = [event for event in item.events if event.space == "gpu"]
    indices = item.indices()
    if item.times <= 2 * WHOLE + 1:
        for index in indices:
            yield from _whole(events, index, namespace)
        return
    for index in indices[:WHOLE]:
        yield from _whole(events, index, namespace)
    yield from _middle(events, indices[WHOLE:-WHOLE], namespace)
    for index in indices[-WHOLE:]:
        yield from _whole(events, index, namespace)


def _whole(events: list[Event], index: int, namespace: str) -> Iterator[Request]:
    for event in events:
        yield Request(f"{namespace}{event.tag}#{index + event.shift}", event.size_bytes, event.stream)


def _middle(events: list[Event], indices: range, namespace: str) -> Iterator[Request]:
    """Only requests whose other half lies outside these iterations."""
    allocated = {event.tag: event.shift for event in events if event.size_bytes > 0}
    freed = {event.tag: event.shift for event in events if event.size_bytes < 0}
    crossing = [event for event in events if allocated.get(event.tag) != freed.get(event.tag)]
    for index in indices:
        for event in crossing:
            storage_index = index + event.shift
            partner = freed if event.size_bytes > 0 else allocated
            if event.tag in partner and storage_index - partner[event.tag] in indices:
                continue
            yield Request(f"{namespace}{event.tag}#{storage_index}", event.size_bytes, event.stream)
