"""What DeepSpeed changes at a mark of a step, and the events that it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from dpofit.memory.partition import BUCKETS, PARTITION
from dpofit.memory.program import Event
from dpofit.memory.spec import BF16
from dpofit.memory.zero3 import LAYER_STRIDE, Action, ModuleIds

_CATEGORY = {"gather": "gathered", "flat": "gathered", "grad": "gradients"}
_STAYING = {BUCKETS: ("buckets", "compute"), PARTITION: ("gradients", "reduce")}

_PASSING = {
    "copy": ("reduce_copy", "buckets"),
    "upload": ("upload", "gathered"),
    "check": ("overflow", "optimizer_workspace"),
    "update": ("update", "optimizer_workspace"),
}


class Effect(NamedTuple):
    """One change of a storage at a mark. `where` is the module, relative to the layer the mark stands in when both lie
    inside the stack (`absolute` False). Those of `_PASSING` come and go, others stay under their own name."""

    kind: str  # gather, flat, grad; of _PASSING; of _STAYING
    size_bytes: int
    where: int
    absolute: bool


def moved(action: Action, base: int) -> Iterator[Effect]:
    """What an action of the coordinator changes, at a mark of the layer with this base."""
    size_bytes = (1 if action.appears else -1) * action.elements * BF16
    yield _effect("flat" if action.flat else "gather", size_bytes, action.module, base)
    if action.uploaded:
        yield Effect("upload", action.uploaded * BF16, 0, False)


def reduced(done: Sequence[tuple[int | str, int]], base: int) -> Iterator[Effect]:
    """What a reducer says is done, as changes at a mark of the layer with this base."""
    for what, size_bytes in done:
        if isinstance(what, str):
            yield Effect(what, size_bytes, 0, what not in _PASSING)
        else:
            yield _effect("grad", -size_bytes, what, base)


def _effect(kind: str, size_bytes: int, module: int, base: int) -> Effect:
    outside = module < LAYER_STRIDE or base == 0
    return Effect(kind, size_bytes, module if outside else module - base, outside)


def events_of(effect: Effect, engine: str, ids: ModuleIds, overlap: bool) -> tuple[Event, ...]:
    """`overlap`: overlap_comm, gathers and reductions have streams, and so memory pools, of their own."""
    name = ids.name(effect.where) if effect.kind in _CATEGORY else ""
    return _of_name(effect, engine, name, overlap)


def is_gather(effect: Effect) -> bool:
    """Whether a parameter comes or goes, whole."""
    return _CATEGORY.get(effect.kind) == "gathered"


@lru_cache(2**14)  # a step has thousands of effects, a search hundreds of steps, and nearly all are the same
def _of_name(effect: Effect, engine: str, name: str, overlap: bool) -> tuple[Event, ...]:
    if effect.kind in _PASSING:
        tag, category = _PASSING[effect.kind]
        copy = Event(tag, effect.size_bytes, category, "gpu", "reduce" if overlap else "compute")
        return copy, copy._replace(size_bytes=-copy.size_bytes)
    if (staying := _STAYING.get(effect.kind.partition(".")[0])) is not None:
        category, stream = staying
        return (Event(effect.kind, effect.size_bytes, category, "gpu", stream if overlap else "compute"),)
    tag = f"grad.{name}" if effect.kind == "grad" else f"{engine}.{effect.kind}.{name}"
    stream = "compute" if effect.kind == "grad" or not overlap else f"{engine}.gather"
    layer = effect.where // LAYER_STRIDE
    if not effect.absolute:
        return (Event(tag, effect.size_bytes, _CATEGORY[effect.kind], "gpu", stream, layer),)
    if effect.where >= LAYER_STRIDE:
        tag = f"{tag}#{layer - 1}"
    return (Event(tag, effect.size_bytes, _CATEGORY[effect.kind], "gpu", stream),)
