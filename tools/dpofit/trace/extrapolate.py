"""A deep model's trace from two shallow ones: what the longer does more is one layer's period, and is done again.

The proof is in the traces themselves: in every phase the events of `n + 1` layers must be those of `n` with blocks put
in, each block equal, event by event and byte by byte, to what stands right before it. So both runs were in a steady
state there, whatever ZeRO's coordinator keeps, and the next layer does the same again. Sizes that stand for totals
(flat partitions, their optimizer states) grow by the same bytes with each layer. Where that isn't so, there is no
extrapolation, and the whole depth is traced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from dpofit.trace.request import TraceRequest
from dpofit.trace.shallow import bucket_fills_deeper, shallow_layers, split_sub_groups, trace_shallow
from dpofit.trace.step import TracedStep, trace_step
from dpofit.trace.storages import Mark, Recorder, Storage

_LAYER = re.compile(r"(?<=\blayers\.)\d+\b")
_RESYNC = 4  # events that must agree after a block that was put in
Peaks = Mapping[tuple[str, int], int]


def trace_deep(request: TraceRequest) -> TracedStep:
    """`request` traced from `shallow_layers` and one more where the proof holds, else at its whole depth.

    The result says which in `substitutions`, and is to the byte the trace of the whole depth (tests/trace). One thing
    is not: with several ZeRO-3 sub_groups the optimizer's step shows one of the largest's size for all; its peak
    lacks their bookkeeping of a few bytes each.
    """
    few = shallow_layers(request)
    tried = [n for n in (few, few + 3) if 2 * n + 1 < request.layers] if few is not None else []
    for layers in tried:  # prefetch gets ahead of use little by little: some jobs are steady only later
        low, high = trace_shallow(request, layers)
        further = request.layers - layers - 1
        if bucket_fills_deeper(low.groups, high.groups, further):
            missed = f"gradients fill the reduce bucket beyond {layers + 1} layers only: all traced"
            break
        recorder = deepened(low.traced.recorder, high.traced.recorder, further)
        if recorder is not None:
            done = f"layers {layers + 1} to {request.layers}: the period proven on {layers} and {layers + 1}, repeated"
            split_sub_groups(recorder, request, low.groups, high.groups, further)
            return TracedStep(request, recorder, (*high.traced.substitutions, done))
    else:
        missed = f"no period was found at {' or '.join(map(str, tried))} layers: all traced"
    whole = trace_step(request)
    if not tried:
        return whole
    return replace(whole, substitutions=(*whole.substitutions, missed))


class _Event(NamedTuple):
    """A mark without what grows with depth (`kind`), and that (`size_bytes`, `layer`)."""

    kind: int  # a number for all that must be the same
    size_bytes: int
    layer: int | None
    storage: Storage


@dataclass(frozen=True, slots=True)
class _Section:
    phase: str
    step: int
    events: tuple[_Event, ...]


def traced_peaks(traced: TracedStep, space: str = "gpu") -> Peaks:
    """Allocated bytes at the peak of each (phase, step)."""
    peaks: dict[tuple[str, int], int] = {}
    live = 0
    for mark in traced.recorder.marks:
        if mark.space == space:
            live += mark.size_bytes
            peaks[mark.phase, mark.step] = max(peaks.get((mark.phase, mark.step), 0), live)
    return peaks


def deepened(low: Recorder, high: Recorder, further: int) -> Recorder | None:
    """The recording of `high`, one layer deeper than `low`, with `further` layers more; None where no period is."""
    kinds: dict[tuple[Any, ...], int] = {}
    low_sections, high_sections = _sections(low, kinds), _sections(high, kinds)
    if [(s.phase, s.step) for s in low_sections] != [(s.phase, s.step) for s in high_sections]:
        return None
    deep = _Writer()
    for short, long in zip(low_sections, high_sections, strict=True):
        deep.phase, deep.step = long.phase, long.step
        if not _extend(short.events, long.events, further, deep):
            return None
    return deep.recorder


def _sections(recorder: Recorder, kinds: dict[tuple[Any, ...], int]) -> list[_Section]:
    """The marks by phase. Deaths in a row are put in order: some come in that of addresses, which means nothing."""
    sections = []
    things = [_thing(storage, kinds) for storage in recorder.storages]
    for (phase, step), marks in groupby(recorder.marks, key=lambda mark: (mark.phase, mark.step)):
        events: list[_Event] = []
        for dying, run in groupby(marks, key=lambda mark: mark.size_bytes < 0):
            several = [_event(mark, recorder.storages[mark.index], *things[mark.index]) for mark in run]
            events += sorted(several, key=lambda event: -event.storage.index) if dying else several
        sections.append(_Section(phase, step, tuple(events)))
    return sections


def _thing(storage: Storage, kinds: dict[tuple[Any, ...], int]) -> tuple[int, int | None]:
    """(a number for what the storage is but for its size and layer, its layer)."""
    found = _LAYER.search(storage.module)
    module = _LAYER.sub("*", storage.module)
    kind = (storage.space, storage.op, module, storage.origin, storage.dtype, len(storage.shape), storage.phase,
            storage.step, storage.category)  # fmt: skip
    return kinds.setdefault(kind, len(kinds) + 1), int(found.group()) if found else None


def _event(mark: Mark, storage: Storage, thing: int, layer: int | None) -> _Event:
    return _Event(thing if mark.size_bytes > 0 else -thing, mark.size_bytes, layer, storage)


def _extend(low: Sequence[_Event], high: Sequence[_Event], further: int, deep: _Writer) -> bool:
    """Write `high` with each of its blocks repeated `further` times more; False where it isn't `low` and periods."""
    at = position = 0  # in `low`, in `high`
    layers: list[int | None] = []  # written for each event of `high`
    while position < len(high):
        short = low[at] if at < len(low) else None
        long = high[position]
        alike = short is not None and short.kind == long.kind
        if not alike or short.size_bytes != long.size_bytes:  # type: ignore[union-attr]
            length = _block(low, at, high, position)
            if length:
                block = high[position : position + length]
                before = high[position - length : position]
                for copy in range(1, 2 + further):
                    for one, other, layer in zip(before, block, layers[position - length : position], strict=True):
                        now = _moved(layer, one.layer, other.layer, copy)
                        if not deep.write(other, other.size_bytes, now):
                            return False
                        if copy == 1:
                            layers.append(now)
                position += length
                continue
        if short is None or not alike:
            return False
        layer = _moved(long.layer, short.layer, long.layer, further)
        if not deep.write(long, long.size_bytes + (long.size_bytes - short.size_bytes) * further, layer):
            return False
        layers.append(layer)
        at, position = at + 1, position + 1
    return at == len(low)


def _moved(layer: int | None, before: int | None, after: int | None, times: int) -> int | None:
    return None if layer is None or before is None or after is None else layer + (after - before) * times


def _block(low: Sequence[_Event], at: int, high: Sequence[_Event], position: int) -> int:
    """How many events of `high` from `position` on repeat those before it, and then `low` goes on; 0 if none do."""
    rest = low[at : at + _RESYNC]
    for exact in (True, False):
        for length in range(1, min(position, len(high) - position) + 1):
            after = high[position + length : position + length + _RESYNC]
            if (
                _same(after, rest, exact=False)
                and _same(after[:1], rest[:1], exact=exact)
                and _same(high[position : position + length], high[position - length : position], exact=True)
            ):
                return length
    return 0


def _same(some: Sequence[_Event], others: Sequence[_Event], exact: bool) -> bool:
    return len(some) == len(others) and all(
        one.kind == other.kind and (not exact or one.size_bytes == other.size_bytes)
        for one, other in zip(some, others, strict=True)
    )


class _Writer:
    """Makes the recording: new storages at births, and at deaths the one alive that is of that kind and size."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.phase, self.step = "", 0
        self._alive: dict[tuple[int, int], list[int]] = {}

    def write(self, event: _Event, size_bytes: int, layer: int | None) -> bool:
        """False when nothing that could die is alive."""
        storages, recorded = self.recorder.storages, event.storage
        module = recorded.module if layer is None else _in_layer(recorded.module, layer)
        alive = self._alive.setdefault((abs(event.kind), abs(size_bytes)), [])
        if size_bytes > 0:
            index = len(storages)
            shape = recorded.shape
            if len(shape) == 1 and size_bytes != recorded.size_bytes:
                shape = (shape[0] * size_bytes // recorded.size_bytes,)
            made = Storage(
                index, size_bytes, recorded.op, module, recorded.phase, recorded.step, recorded.born,
                recorded.category, recorded.space, shape, recorded.dtype, origin=recorded.origin,
            )  # fmt: skip
            storages.append(made)
            alive.append(index)
        else:
            if not alive:
                return False
            index = alive[-1]
            if storages[index].module != module:
                index = next((i for i in reversed(alive) if storages[i].module == module), index)
            alive.remove(index)
            storages[index].died = recorded.died
        self.recorder.marks.append(Mark(self.phase, self.step, index, size_bytes, event.storage.space))
        return True


@cache
def _in_layer(module: str, layer: int) -> str:
    return _LAYER.sub(str(layer), module)
