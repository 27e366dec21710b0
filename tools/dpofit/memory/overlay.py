"""Lays DeepSpeed over a step: the marks of its parts become gathers, releases and gradient reductions.

`decide` says what happens at every mark; it does not depend on lengths, so one decision serves a step of any length.
`lay` writes the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from dpofit.memory.bucket import Reducer
from dpofit.memory.effects import Effect, events_of, is_gather, moved, reduced
from dpofit.memory.engine import OUTSIDE, Engine, actions_at_marks, layers_in_order
from dpofit.memory.layerwise import StepInBackward
from dpofit.memory.part import Part
from dpofit.memory.partition import PartitionReducer
from dpofit.memory.program import Event, Repeat
from dpofit.memory.spec import BF16
from dpofit.memory.tape import Mark
from dpofit.memory.zero3 import LAYER_STRIDE, Action, ModuleIds, offset

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
    kept: tuple[
        Event, ...
    ] = ()  # what the parts leave gathered until engine.step releases it: `actions_at_marks` says why


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
    moves = {engine.name: actions_at_marks(parts, marks, engine, ids) for engine in engines}
    hooks = {name: iter(actions) for name, (_, actions) in moves.items()}
    runs = [
        tuple(_runs(part, part_marks, hooks.get(part.engine), reducer, ids))
        for part, part_marks in zip(parts, marks, strict=True)
    ]
    final = tuple(reduced(reducer.flush(), 0)) if reducer is not None else ()
    decisions = Decisions(tuple(runs), final, ids, overlap)
    found = [
        event
        for name, (actions, _) in moves.items()
        for action in actions
        for effect in moved(action, 0)
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
    for layer in layers_in_order(part):
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
            else tuple(effect for action in next(hooked, ()) for effect in moved(action, base))
            for mark in marks
        )
        last_run = runs[-1] if runs else None
        if last_run is not None and last_run.decision == decision and not any(e.absolute for d in decision for e in d):
            runs[-1] = Run(last_run.first, last_run.times + 1, decision)
        else:
            runs.append(Run(layer, 1, decision))
    return runs


def _gradient_effects(mark: Mark, base: int, reducer: Taker | None, ids: ModuleIds) -> tuple[Effect, ...]:
    if reducer is None:
        return ()
    module = ids.base(mark.module) + (0 if mark.module in OUTSIDE else base)
    return tuple(reduced(reducer.add(module, mark.elements, mark.size_bytes), base))


def _kept(parts: Sequence[Part], decisions: Decisions) -> tuple[Event, ...]:
    alive = {event.tag: event for event in decisions.found}
    for part, runs in zip(parts, decisions.runs, strict=True):
        for run in runs:
            moves = [
                (effect.absolute or run.first is None, event)
                for effects in run.decision
                for effect in effects
                if is_gather(effect)
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
            items += _expand(part, run, decisions)
    for effect in decisions.final:
        phases.setdefault("backward", []).extend(_events(effect, "policy", decisions))
    return phases


def _expand(part: Part, run: Run, decisions: Decisions) -> list[Event | Repeat]:
    """The part's events with each mark replaced, for the run's layers; what is of no layer stands between repeats."""
    out: list[Event | Repeat] = []
    stretch: list[Event] = []  # of the layer

    def close() -> None:
        if run.first is None:
            out.extend(stretch)
        elif stretch:
            out.append(Repeat(tuple(stretch), run.times, run.first, part.reverse))
        stretch.clear()

    marks = iter(run.decision)
    for record in part.records:
        if isinstance(record, Event):
            stretch.append(record)
            continue
        for effect in next(marks):
            events = _events(effect, part.engine, decisions)
            if effect.absolute and run.first is not None and run.times == 1:
                close()
                out += events
            else:
                stretch += events
    close()
    return out


def reduced_after(gradients: Sequence[tuple[int, int]], reducer: Taker, decisions: Decisions) -> list[Event]:
    """What reducing these (module, elements) does, one after another, when all of them are there."""
    done: list[tuple[int | str, int]] = []
    for module, elements in gradients:
        done += reducer.add(module, elements, elements * BF16)
    done += reducer.flush()
    return [event for effect in reduced(done, 0) for event in _events(effect, "policy", decisions)]


def _events(effect: Effect, engine: str, decisions: Decisions) -> tuple[Event, ...]:
    return events_of(effect, engine, decisions.ids, decisions.overlap)
