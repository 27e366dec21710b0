"""Lays DeepSpeed over a step: the marks of its parts become gathers, releases and gradient reductions.

`decide` says what happens at every mark; it does not depend on lengths, so one decision serves a step of any length.
`lay` writes the events. Sources: deepspeed 0.18.4 runtime/zero/stage3.py:1327-1418 (buckets),
runtime/comm/coalesced_collectives.py (reduce_scatter_coalesced); of ZeRO-1/2 see memory/partition.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import NamedTuple

from dpofit.memory.layerwise import StepInBackward
from dpofit.memory.part import Part
from dpofit.memory.partition import BUCKETS, PARTITION, PartitionReducer
from dpofit.memory.program import Event, Repeat
from dpofit.memory.spec import BF16
from dpofit.memory.tape import Mark
from dpofit.memory.zero3 import (
    LAYER_STRIDE,
    NO_LEAVES,
    Action,
    CoordinatorConfig,
    Leaves,
    ModuleIds,
    coordinate,
    left_gathered,
    offset,
    retraced,
    untraced,
)

FETCHES = ("pre", "pre_backward")
NOBODY = LAYER_STRIDE - 1  # a module without parameters
OUTSIDE = frozenset({"embed_tokens", "norm", "lm_head"})


@dataclass(frozen=True, slots=True)
class Engine:
    """One DeepSpeed engine of stage 3: its parameters by module, its settings, whether its trace is complete."""

    name: str
    parameters: Mapping[int, tuple[int, ...]]
    config: CoordinatorConfig
    traced: bool
    twice: bool = False  # forwarded twice a step, policy and reference: see `_hooks`
    leaves: Leaves = NO_LEAVES
    steady: bool = False  # not the first step
    later: bool = False  # no step's first micro-batch: what the one before left gathered is there
    embedding_hooked: bool = True  # backward reaches the embedding, whose hook gathers it and never releases
    in_host_memory: int = 1  # parts of each parameter, of which each rank copies its own to the GPU to gather it

    def __hash__(self) -> int:  # mappings have none; equality compares all
        return hash((self.name, self.config, self.traced))


class Effect(NamedTuple):
    """One change of a storage at a mark. `where` is the module, relative to the layer the mark stands in when both lie
    inside the stack (`absolute` False). Those of `_PASSING` come and go, others stay under their own name."""

    kind: str  # gather, flat, grad; of _PASSING; of _STAYING
    size_bytes: int
    where: int
    absolute: bool


@dataclass(slots=True)
class Reducer:
    """The gradient bucket of ZeRO-3: small gradients are copied into the buffer, one larger than the bucket keeps its
    own storage until the next gradient flushes it."""

    bucket_elements: int
    world_size: int
    filled: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (module, bytes) still in their own storage
    tensors: list[int] = field(default_factory=list)  # elements of each gradient in the bucket

    def add(self, module: int, elements: int, size_bytes: int) -> list[tuple[int | str, int]]:
        """(module, bytes): that gradient is freed; a copy of the bucket comes and goes."""
        done: list[tuple[int | str, int]] = []
        if self.filled and self.filled + elements > self.bucket_elements:
            done += self.flush()
        if self.filled + elements <= self.bucket_elements:
            done.append((module, size_bytes))
        else:
            self.waiting.append((module, size_bytes))
        self.filled += elements
        self.tensors.append(elements)
        return done

    def state(self, base: int) -> tuple[object, ...]:
        """What decides how the next gradients fare, seen from a layer's base."""
        return self.filled, tuple(self.tensors), tuple((module - base, size) for module, size in self.waiting)

    def shift(self, distance: int) -> None:
        """The same layer again, one further: what waits now belongs to the next layer."""
        self.waiting = [(module + distance, size) for module, size in self.waiting]

    def flush(self) -> list[tuple[int | str, int]]:
        """reduce_scatter_coalesced copies unless one tensor divides evenly; then the gradients go."""
        done: list[tuple[int | str, int]] = []
        if self.tensors and not (len(self.tensors) == 1 and self.tensors[0] % self.world_size == 0):
            done.append(("copy", self.filled * BF16))
        done += self.waiting
        self.waiting, self.tensors, self.filled = [], [], 0
        return done


Taker = Reducer | PartitionReducer | StepInBackward  # of gradients, as they appear
Decision = tuple[tuple[Effect, ...], ...]  # for each mark of a part


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers (in the part's order) at which the same things happen; one `None` layer outside the stack."""

    first: int | None
    times: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Decisions:
    """What is gathered before the first part, what happens at the marks of each, and after the last."""

    runs: tuple[tuple[Run, ...], ...]
    final: tuple[Effect, ...]
    ids: ModuleIds
    overlap: bool
    found: tuple[Event, ...] = ()
    kept: tuple[Event, ...] = ()  # what the parts leave gathered until engine.step releases it: `_hooks` says why


REMEMBERED = 32
_decided: dict[object, Decisions] = {}  # marks, engines, bucket → what was worked out: recipes have most in common


def decide(
    parts: Sequence[Part], engines: Sequence[Engine], reducer: Taker | None, ids: ModuleIds, overlap: bool = False
) -> Decisions:
    """Without engines no parameter moves (below stage 3); without a reducer gradients stay. `overlap`: overlap_comm,
    gathers and reductions have streams, and so memory pools, of their own."""
    shapes = [replace(part, records=tuple(r for r in part.records if isinstance(r, Mark))) for part in parts]
    key = tuple(shapes), tuple(engines), repr(reducer), repr(ids), overlap
    if key not in _decided:
        if len(_decided) >= REMEMBERED:
            _decided.clear()
        _decided[key] = _decide(parts, engines, reducer, ids, overlap)
    return _decided[key]


def _decide(
    parts: Sequence[Part], engines: Sequence[Engine], reducer: Taker | None, ids: ModuleIds, overlap: bool
) -> Decisions:
    marks = [[record for record in part.records if isinstance(record, Mark)] for part in parts]
    moves = {engine.name: _hooks(parts, marks, engine, ids) for engine in engines}
    hooks = {name: iter(actions) for name, (_, actions) in moves.items()}
    runs = [
        tuple(_runs(part, part_marks, hooks.get(part.engine), reducer, ids))
        for part, part_marks in zip(parts, marks, strict=True)
    ]
    final = tuple(_reduced(reducer.flush(), 0)) if reducer is not None else ()
    decisions = Decisions(tuple(runs), final, ids, overlap)
    found = [
        event
        for name, (actions, _) in moves.items()
        for action in actions
        for effect in _moved(action, 0)
        for event in _events(effect, name, decisions)
    ]
    decisions = replace(decisions, found=tuple(found))
    return replace(decisions, kept=_kept(parts, decisions)) if engines else decisions


def _runs(
    part: Part, marks: Sequence[Mark], actions: Iterator[tuple[Action, ...]] | None, reducer: Taker | None,
    ids: ModuleIds,
) -> list[Run]:  # fmt: skip
    """Group layers: where the coordinator acts as at the layer before, and the bucket started as it did, the same
    things happen and nothing is worked out again."""
    runs: list[Run] = []
    gradients = reducer if any(mark.kind == "grad" for mark in marks) else None
    hook_count = sum(mark.kind != "grad" for mark in marks) if actions is not None else 0
    before: object = None
    for layer in _order(part):
        base = 0 if layer is None else offset(layer)
        taken = list(islice(actions, hook_count)) if actions is not None else []
        moves = tuple(
            (index, action.appears, action.module if action.module < LAYER_STRIDE else action.module - base, action)
            for index, done in enumerate(taken)
            if done
            for action in done
        )
        state = (tuple(move[:3] for move in moves), gradients.state(base) if gradients else None)
        steady = state == before and all(move[3].module >= LAYER_STRIDE for move in moves)
        before = state
        if steady:
            last = runs[-1]
            runs[-1] = Run(last.first, last.times + 1, last.decision)
            if gradients:
                gradients.shift(-LAYER_STRIDE if part.reverse else LAYER_STRIDE)
            continue
        hooked = iter(taken)
        decision = tuple(
            _gradient_effects(mark, base, gradients, ids)
            if mark.kind == "grad"
            else tuple(effect for action in next(hooked, ()) for effect in _moved(action, base))
            for mark in marks
        )
        last_run = runs[-1] if runs else None
        if last_run is not None and last_run.decision == decision and not any(e.absolute for d in decision for e in d):
            runs[-1] = Run(last_run.first, last_run.times + 1, decision)
        else:
            runs.append(Run(layer, 1, decision))
    return runs


def _order(part: Part) -> Sequence[int | None]:
    if not part.layers:
        return [None]
    layers = range(part.first, part.first + part.layers)
    return layers[::-1] if part.reverse else layers


def _hooks(
    parts: Sequence[Part], marks: Sequence[Sequence[Mark]], engine: Engine, ids: ModuleIds
) -> tuple[list[Action], list[tuple[Action, ...]]]:
    """What the engine finds gathered, and its actions at its marks, in order.

    An engine forwarded twice keeps what it gathers for backward: the second forward, without gradients, resets the
    counter by which the hook of the first one's backward would know its end (parameter_offload.py
    ds_grads_remaining). Layers that are recomputed later have counters of their own again.
    """
    hooks: list[tuple[bool, int]] = []
    forwards: list[int] = []  # where each begins
    for part, part_marks in zip(parts, marks, strict=True):
        if part.engine != engine.name:
            continue
        if any(mark.kind == "pre" and mark.module == "root" for mark in part_marks):
            forwards.append(len(hooks))
        recomputed = any(mark.kind == "pre" for mark in part_marks)
        relative = [
            (
                mark.kind in FETCHES,
                NOBODY if _lost(mark, engine, recomputed) else ids.base(mark.module),
                mark.module in OUTSIDE,
            )
            for mark in part_marks
            if mark.kind != "grad"
        ]
        for layer in _order(part):
            base = 0 if layer is None else offset(layer)
            hooks += [(fetch, module if outside else module + base) for fetch, module, outside in relative]
    several = engine.steady and not engine.traced and len(forwards) > 1
    threshold = 0 if several else engine.config.persistence_threshold
    sizes = {m: sum(count for count in counts if count > threshold) for m, counts in engine.parameters.items()}

    def acted(found: frozenset[int]) -> list[tuple[Action, ...]]:
        if engine.traced:
            actions = coordinate(hooks, engine.parameters, engine.config, engine.leaves, found)
        elif several:
            passes = [hooks[start:end] for start, end in pairwise([*forwards, len(hooks)])]
            actions = retraced(passes, engine.parameters, engine.config, engine.leaves, found)
        else:
            actions = untraced(hooks, sizes, engine.leaves, found)
        if engine.in_host_memory == 1:
            return actions
        return [tuple(_uploaded(action, engine.in_host_memory) for action in done) for done in actions]

    actions = acted(frozenset())
    left = left_gathered(actions) if engine.later else frozenset()
    return [Action(True, module, sizes[module]) for module in sorted(left)], acted(left) if left else actions


def _uploaded(action: Action, parts: int) -> Action:
    fetched = action.appears and not action.copied
    return action._replace(uploaded=-(-action.elements // parts)) if fetched else action


def _lost(mark: Mark, engine: Engine, recomputed: bool) -> bool:
    embedding = engine.embedding_hooked and mark.module == "embed_tokens"  # a tied head's module too
    return mark.kind == "post_backward" and (embedding or (engine.twice and not recomputed))


def _gradient_effects(mark: Mark, base: int, reducer: Taker | None, ids: ModuleIds) -> tuple[Effect, ...]:
    if reducer is None:
        return ()
    module = ids.base(mark.module) + (0 if mark.module in OUTSIDE else base)
    return tuple(_reduced(reducer.add(module, mark.elements, mark.size_bytes), base))


def _moved(action: Action, base: int) -> Iterator[Effect]:
    size_bytes = (1 if action.appears else -1) * action.elements * BF16
    yield _effect("flat" if action.flat else "gather", size_bytes, action.module, base)
    if action.uploaded:
        yield Effect("upload", action.uploaded * BF16, 0, False)


def _reduced(done: Sequence[tuple[int | str, int]], base: int) -> Iterator[Effect]:
    for what, size_bytes in done:
        if isinstance(what, str):
            yield Effect(what, size_bytes, 0, what not in _PASSING)
        else:
            yield _effect("grad", -size_bytes, what, base)


def _effect(kind: str, size_bytes: int, module: int, base: int) -> Effect:
    outside = module < LAYER_STRIDE or base == 0
    return Effect(kind, size_bytes, module if outside else module - base, outside)


def _kept(parts: Sequence[Part], decisions: Decisions) -> tuple[Event, ...]:
    alive = {event.tag: event for event in decisions.found}
    for part, runs in zip(parts, decisions.runs, strict=True):
        for run in runs:
            moves = [
                (effect.absolute or run.first is None, event)
                for effects in run.decision
                for effect in effects
                if _CATEGORY.get(effect.kind) == "gathered"
                for event in _events(effect, part.engine, decisions)
            ]
            first, step = run.first or 0, -1 if part.reverse else 1
            for layer in range(first, first + step * run.times, step) if moves else ():
                for absolute, event in moves:
                    tag = event.tag if absolute else f"{event.tag}#{layer + event.shift}"
                    if event.size_bytes < 0:
                        del alive[tag]
                    else:
                        alive[tag] = event._replace(tag=tag, shift=0)
    return tuple(alive.values())


def lay(parts: Sequence[Part], decisions: Decisions) -> dict[str, list[Event | Repeat]]:
    """Items per phase, in order."""
    phases: dict[str, list[Event | Repeat]] = {parts[0].phase: list(decisions.found)}
    for part, runs in zip(parts, decisions.runs, strict=True):
        items = phases.setdefault(part.phase, [])
        for run in runs:
            if run.first is None:
                items += _expand(part, None, run.decision, decisions)
            elif run.times == 1:
                items += _expand(part, run.first, run.decision, decisions)
            else:
                events = tuple(_expand(part, None, run.decision, decisions))
                items.append(Repeat(events, run.times, run.first, part.reverse))
    for effect in decisions.final:
        phases.setdefault("backward", []).extend(_events(effect, "policy", decisions))
    return phases


def _expand(part: Part, layer: int | None, decision: Decision, decisions: Decisions) -> list[Event]:
    """The part's events with each mark replaced; written out for `layer` when given."""
    out: list[Event] = []
    marks = iter(decision)
    for record in part.records:
        if isinstance(record, Event):
            out.append(record if layer is None else _of_layer(record, layer))
            continue
        for effect in next(marks):
            events = _events(effect, part.engine, decisions)
            out += events if layer is None or effect.absolute else [_of_layer(event, layer) for event in events]
    return out


def _of_layer(event: Event, layer: int) -> Event:
    return Event(f"{event.tag}#{layer + event.shift}", event.size_bytes, event.category, event.space, event.stream)


def reduced_after(gradients: Sequence[tuple[int, int]], reducer: Taker, decisions: Decisions) -> list[Event]:
    """What reducing these (module, elements) does, one after another, when all of them are there."""
    done: list[tuple[int | str, int]] = []
    for module, elements in gradients:
        done += reducer.add(module, elements, elements * BF16)
    done += reducer.flush()
    return [event for effect in _reduced(done, 0) for event in _events(effect, "policy", decisions)]


_CATEGORY = {"gather": "gathered", "flat": "gathered", "grad": "gradients"}
_STAYING = {BUCKETS: ("buckets", "compute"), PARTITION: ("gradients", "reduce")}

_PASSING = {
    "copy": ("reduce_copy", "buckets"),
    "upload": ("upload", "gathered"),
    "check": ("overflow", "optimizer_workspace"),
    "update": ("update", "optimizer_workspace"),
}


def _events(effect: Effect, engine: str, decisions: Decisions) -> tuple[Event, ...]:
    name = decisions.ids.name(effect.where) if effect.kind in _CATEGORY else ""
    return _events_of(effect, engine, name, decisions.overlap)


@lru_cache(2**14)  # a step has thousands of effects, a search hundreds of steps, and nearly all are the same
def _events_of(effect: Effect, engine: str, name: str, overlap: bool) -> tuple[Event, ...]:
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
