"""Lays DeepSpeed over a step: the marks of its parts become gathers, releases and gradient reductions.

Sources: deepspeed 0.18.4 runtime/zero/stage3.py:1327-1418 (buckets), runtime/comm/coalesced_collectives.py
(reduce_scatter_coalesced), runtime/zero/stage_1_and_2.py:1028-1075.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dpofit.memory.parts import Part
from dpofit.memory.program import Event, Repeat
from dpofit.memory.spec import BF16
from dpofit.memory.tape import Mark
from dpofit.memory.zero3 import Action, CoordinatorConfig, Hook, Module, coordinate

GLOBAL = frozenset({"embed_tokens", "norm", "lm_head"})
FETCH, RELEASE = ("pre", "pre_backward"), ("post", "post_backward")


@dataclass(frozen=True, slots=True)
class Engine:
    """One DeepSpeed engine of stage 3: its parameters by module, its settings, whether its trace is complete."""

    parameters: Mapping[Module, tuple[int, ...]]
    config: CoordinatorConfig
    traced: bool


@dataclass(slots=True)
class Reducer:
    """The gradient bucket of ZeRO-2 and 3: small gradients are copied into the buffer, one larger than the bucket
    keeps its own storage until the next gradient flushes it."""

    bucket_elements: int
    world_size: int
    filled: int = 0
    waiting: list[tuple[Module, int]] = field(default_factory=list)  # gradients still in their own storage
    tensors: list[int] = field(default_factory=list)  # elements of each gradient in the bucket

    def add(self, module: Module, elements: int, size_bytes: int) -> list[tuple[Module | None, int]]:
        """(module, bytes): that gradient is freed; (None, bytes): a copy of the bucket comes and goes."""
        done: list[tuple[Module | None, int]] = []
        if self.filled and self.filled + elements > self.bucket_elements:
            done += self.flush()
        if self.filled + elements <= self.bucket_elements:
            done.append((module, size_bytes))
        else:
            self.waiting.append((module, size_bytes))
        self.filled += elements
        self.tensors.append(elements)
        return done

    def flush(self) -> list[tuple[Module | None, int]]:
        """reduce_scatter_coalesced copies unless one tensor divides evenly; then the gradients go."""
        copy_bytes = 0
        if not (len(self.tensors) == 1 and self.tensors[0] % self.world_size == 0):
            copy_bytes = self.filled * BF16
        done: list[tuple[Module | None, int]] = [(None, copy_bytes)] if copy_bytes else []
        done += self.waiting
        self.waiting, self.tensors, self.filled = [], [], 0
        return done


def lay(
    parts: Sequence[Part], engines: Mapping[str, Engine], reducer: Reducer | None
) -> dict[str, list[Event | Repeat]]:
    """Items per phase, in order. Without engines no parameter moves (below stage 3); without a reducer gradients stay."""
    actions = {name: iter(_actions(parts, name, engine)) for name, engine in engines.items()}
    phases: dict[str, list[Event | Repeat]] = {}
    for part in parts:
        items = phases.setdefault(part.phase, [])
        hooks = actions.get(part.engine)
        if not part.layers:
            items += _expand(part, None, _decide(part, None, hooks, reducer))
            continue
        order = range(part.layers - 1, -1, -1) if part.reverse else range(part.layers)
        run: list[int] = []
        previous: tuple[tuple[Event, ...], ...] | None = None
        for layer in order:
            decided = _decide(part, layer, hooks, reducer)
            if decided != previous or _has_global(decided):
                items += _flush_run(part, run, previous)
                run, previous = [], decided
            run.append(layer)
        items += _flush_run(part, run, previous)
    if reducer is not None and reducer.filled:
        last = phases.setdefault("backward", [])
        last += [event for done in [reducer.flush()] for event in _reduced(done, None)]
    return phases


def _actions(parts: Sequence[Part], name: str, engine: Engine) -> list[list[Action]]:
    hooks = []
    for part in parts:
        if part.engine != name:
            continue
        order: Sequence[int | None] = [None]
        if part.layers:
            order = list(range(part.layers - 1, -1, -1) if part.reverse else range(part.layers))
        marks = [record for record in part.records if isinstance(record, Mark) and record.kind != "grad"]
        for layer in order:
            hooks += [Hook(mark.kind in FETCH, _module(mark.module, layer)) for mark in marks]
    return coordinate(hooks, engine.parameters, engine.config, engine.traced)[0]


def _module(name: str, layer: int | None) -> Module:
    return Module(None if name in GLOBAL else layer, name)


def _decide(
    part: Part, layer: int | None, hooks: Iterator[list[Action]] | None, reducer: Reducer | None
) -> tuple[tuple[Event, ...], ...]:
    """For each mark of the part, the events it stands for at this layer, tags relative to the layer."""
    decided: list[tuple[Event, ...]] = []
    for record in part.records:
        if not isinstance(record, Mark):
            continue
        if record.kind == "grad":
            if reducer is None:
                decided.append(())
            else:
                module = Module(layer, record.module)
                decided.append(tuple(_reduced(reducer.add(module, record.elements, record.size_bytes), layer)))
        elif hooks is None:
            decided.append(())
        else:
            decided.append(tuple(_moved(action, part.engine, layer) for action in next(hooks)))
    return tuple(decided)


def _moved(action: Action, engine: str, layer: int | None) -> Event:
    sign = 1 if action.appears else -1
    kind = "flat" if action.flat else "gather"
    tag = f"{engine}.{kind}.{action.module.name}"
    return _placed(tag, sign * action.elements * BF16, "gathered", action.module, layer, "gather")


def _reduced(done: Sequence[tuple[Module | None, int]], layer: int | None) -> Iterator[Event]:
    for module, size_bytes in done:
        if module is None:
            yield Event("reduce_copy", size_bytes, "buckets", "gpu", "reduce")
            yield Event("reduce_copy", -size_bytes, "buckets", "gpu", "reduce")
        else:
            yield _placed(f"grad.{module.name}", -size_bytes, "gradients", module, layer, "compute")


def _placed(tag: str, size_bytes: int, category: str, module: Module, layer: int | None, stream: str) -> Event:
    """A storage of `module`, named from where `layer` stands: by shift inside the stack, by index outside."""
    if module.layer is None:
        return Event(tag, size_bytes, category, "gpu", stream, shift=_NOWHERE if layer is not None else 0)
    if layer is None:
        return Event(f"{tag}#{module.layer}", size_bytes, category, "gpu", stream)
    return Event(tag, size_bytes, category, "gpu", stream, shift=module.layer - layer)


_NOWHERE = 1 << 30  # marks, inside a layer, a storage that belongs to no layer: such a layer is written out


def _has_global(decided: tuple[tuple[Event, ...], ...]) -> bool:
    return any(event.shift == _NOWHERE for events in decided for event in events)


def _flush_run(part: Part, run: Sequence[int], decided: tuple[tuple[Event, ...], ...] | None) -> list[Event | Repeat]:
    if not run or decided is None:
        return []
    if _has_global(decided):
        return [event for layer in run for event in _expand(part, layer, decided)]
    events = tuple(_expand(part, None, decided))
    return [Repeat(events, len(run), run[0], part.reverse)]


def _expand(part: Part, layer: int | None, decided: tuple[tuple[Event, ...], ...]) -> list[Event]:
    """The part's events with each mark replaced; written out for `layer` when given."""
    out: list[Event] = []
    marks = iter(decided)
    for record in part.records:
        if isinstance(record, Mark):
            out += next(marks)
        else:
            out.append(record)
    if layer is None:
        return out
    return [
        event._replace(shift=0)
        if event.shift == _NOWHERE
        else event._replace(tag=f"{event.tag}#{layer + event.shift}", shift=0)
        for event in out
    ]
