"""Turns a program's GPU events into the list the allocator replay reads, whole or short: then middle layers give only
what outlives them, since their temporaries reuse the blocks of the first layers."""

from __future__ import annotations

from dpofit.memory.program import Event, Phase, Repeat

WHOLE = 1  # layers written out whole at either end of a repeat; all of them give reserved bytes within 2% of it


# What the allocator sees: the storage, its bytes (negative: freed), the stream.
Request = tuple[str, int, str]
# An event of a repeat: its tag, to be followed by the layer; what is added to the layer; bytes; stream.
_Part = tuple[str, int, int, str]


def requests(phase: Phase, namespace: str = "", whole: bool = False) -> list[Request]:
    """The phase's GPU requests, layers collapsed unless `whole`. `namespace` tells different steps' storages apart."""
    found: list[Request] = []
    for item in phase.items:
        if isinstance(item, Event):
            if item.space == "gpu":
                found.append((namespace + item.tag, item.size_bytes, item.stream))
        else:
            found += _repeat(item, namespace, whole)
    return found


def _repeat(item: Repeat, namespace: str, whole: bool) -> list[Request]:
    events = [
        (f"{namespace}{event.tag}#", event.shift, event.size_bytes, event.stream)
        for event in item.events
        if event.space == "gpu"
    ]
    indices = item.indices()
    if whole or item.times <= 2 * WHOLE + 1:
        return _whole(events, indices)
    return [
        *_whole(events, indices[:WHOLE]),
        *_middle(events, indices[WHOLE:-WHOLE]),
        *_whole(events, indices[-WHOLE:]),
    ]


def _whole(events: list[_Part], indices: range) -> list[Request]:
    """A storage that comes and goes inside a layer has the same name in each of several."""
    if len(indices) == 1:
        return [(f"{tag}{indices[0] + shift}", size_bytes, stream) for tag, shift, size_bytes, stream in events]
    outlives = _outliving(events)
    layer: list[Request] = [(tag, size_bytes, stream) for tag, _, size_bytes, stream in events]
    crossing = [(at, *event) for at, event in enumerate(events) if event[0] in outlives]
    found: list[Request] = []
    for index in indices:
        for at, tag, shift, size_bytes, stream in crossing:
            layer[at] = f"{tag}{index + shift}", size_bytes, stream
        found += layer
    return found


def _middle(events: list[_Part], indices: range) -> list[Request]:
    """Only requests whose other half lies outside these iterations, in order; a storage that appears and goes inside
    leaves nothing."""
    outlives = _outliving(events)
    crossing = [event for event in events if event[0] in outlives]
    kept: dict[tuple[str, bool], Request] = {}
    for index in indices:
        for tag, shift, size_bytes, stream in crossing:
            storage = f"{tag}{index + shift}"
            appears = size_bytes > 0
            if appears or kept.pop((storage, True), None) is None:
                kept[storage, appears] = storage, size_bytes, stream
    return list(kept.values())


def _outliving(events: list[_Part]) -> set[str]:
    """Tags of storages that outlive one iteration: not each one that appears goes in it, of the same layer."""
    found: set[str] = set()
    alive: dict[str, int] = {}
    for tag, shift, size_bytes, _ in events:
        if (size_bytes > 0) == (tag in alive):
            found.add(tag)  # twice, or not of this iteration
        if size_bytes > 0:
            alive[tag] = shift
        elif alive.pop(tag, shift) != shift:
            found.add(tag)
    return found | alive.keys()
