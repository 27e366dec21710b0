"""Turns a program's GPU events into the list the allocator replay reads, whole or short: then middle layers give only
what outlives them, since their temporaries reuse the blocks of the first layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dpofit.memory.program import Event, Phase, Repeat

WHOLE = 1  # layers written out whole at either end of a repeat; all of them give reserved bytes within 2% of it


class Request(NamedTuple):
    """What the allocator sees: the storage, its bytes (negative: freed), the stream."""

    storage: str
    size_bytes: int
    stream: str


def requests(phase: Phase, namespace: str = "", whole: bool = False) -> Iterator[Request]:
    """The phase's GPU requests, layers collapsed unless `whole`. `namespace` tells different steps' storages apart."""
    for item in phase.items:
        if isinstance(item, Event):
            if item.space == "gpu":
                yield Request(namespace + item.tag, item.size_bytes, item.stream)
        else:
            yield from _repeat(item, namespace, whole)


def _repeat(item: Repeat, namespace: str, whole: bool) -> Iterator[Request]:
    events = [event for event in item.events if event.space == "gpu"]
    indices = item.indices()
    if whole or item.times <= 2 * WHOLE + 1:
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
    by_tag: dict[str, list[Event]] = {}
    for event in events:
        by_tag.setdefault(event.tag, []).append(event)
    crossing = [event for event in events if not _contained(by_tag[event.tag])]
    kept: dict[tuple[str, bool], Request] = {}  # in order; a storage that appears and goes inside leaves nothing
    for index in indices:
        for event in crossing:
            storage = f"{namespace}{event.tag}#{index + event.shift}"
            appears = event.size_bytes > 0
            if appears or kept.pop((storage, True), None) is None:
                kept[storage, appears] = Request(storage, event.size_bytes, event.stream)
    yield from kept.values()


def _contained(events: list[Event]) -> bool:
    """Does a storage of this tag never outlive one iteration? Each time it appears, it goes, of the same layer."""
    pairs = zip(events[::2], events[1::2], strict=False)
    return len(events) % 2 == 0 and all(
        appears.size_bytes > 0 > goes.size_bytes and appears.shift == goes.shift for appears, goes in pairs
    )
