"""One DeepSpeed engine of stage 3: what its hooks do at the marks of a step's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dpofit.memory.part import Part
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
    twice: bool = False  # forwarded twice a step, policy and reference: see `actions_at_marks`
    leaves: Leaves = NO_LEAVES
    steady: bool = False  # not the first step
    later: bool = False  # no step's first micro-batch: what the one before left gathered is there
    embedding_hooked: bool = True  # backward reaches the embedding, whose hook gathers it and never releases
    in_host_memory: int = 1  # parts of each parameter, of which each rank copies its own to the GPU to gather it

    def __hash__(self) -> int:  # mappings have none; equality compares all
        return hash((self.name, self.config, self.traced))


def layers_in_order(part: Part) -> Sequence[int | None]:
    """Of the part, as it runs; one `None` outside the stack."""
    if not part.layers:
        return [None]
    layers = range(part.first, part.first + part.layers)
    return layers[::-1] if part.reverse else layers


def actions_at_marks(
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
        for layer in layers_in_order(part):
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
