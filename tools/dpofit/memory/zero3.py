"""ZeRO-3's parameter coordinator: which modules' parameters are gathered and released at every hook of a step.

Models deepspeed 0.18.4 runtime/zero/partitioned_param_coordinator.py and parameter_offload.py. The order of hooks is
the tape's; a module without parameters counts too, since every pre-hook prefetches. A module is an integer, because a
step has tens of thousands of hooks: see ModuleIds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

LAYER_STRIDE = 64  # more than the modules of a layer


@dataclass(slots=True)
class ModuleIds:
    """Names ↔ integers. Modules outside the layers are below LAYER_STRIDE; layer i's start at (i + 1) x stride."""

    outside: frozenset[str]
    _index: dict[str, int] = field(default_factory=dict)

    def base(self, name: str) -> int:
        """A name's number; add `offset(layer)` unless it lies outside the layers."""
        index = self._index.setdefault(name, len(self._index))
        assert index < LAYER_STRIDE
        return index

    def module(self, name: str, layer: int | None) -> int:
        return self.base(name) + (0 if layer is None or name in self.outside else offset(layer))

    def name(self, module: int) -> str:
        return next(islice(self._index, module % LAYER_STRIDE, None))


def offset(layer: int) -> int:
    return (layer + 1) * LAYER_STRIDE


class Action(NamedTuple):
    """A buffer of `elements` parameters appears or goes: a module's own, or `flat`, the one that several parameters
    fetched in one call arrive in and are copied out of (partition_parameters.py AllGatherCoalescedHandle.wait).
    `module` is the last that is met of those fetched ahead. `copied`: it comes out of such a buffer."""

    appears: bool
    module: int
    elements: int
    flat: bool = False
    copied: bool = False
    uploaded: int = 0  # elements of this rank's slice, when it is copied from host memory first


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Sizes in elements, `auto` resolved."""

    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    persistence_threshold: int


def persistent_elements(parameters: Mapping[int, tuple[int, ...]], config: CoordinatorConfig) -> int:
    """Elements of parameters small enough to stay gathered."""
    threshold = config.persistence_threshold
    return sum(count for counts in parameters.values() for count in counts if count <= threshold)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaf modules (deepspeed utils/z3_leaf_module.py): their hooks answer for all parameters inside them."""

    members: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # of each leaf: the modules inside
    containers: Mapping[int, int] = field(default_factory=dict)  # a module around a leaf → that leaf
    elements: Mapping[int, int] = field(default_factory=dict)  # of each module with others inside, all of them


NO_LEAVES = Leaves()


def coordinate(
    hooks: Sequence[tuple[bool, int]],
    parameters: Mapping[int, tuple[int, ...]],
    config: CoordinatorConfig,
    leaves: Leaves = NO_LEAVES,
    found: frozenset[int] = frozenset(),
    asked: int | None = None,
) -> list[tuple[Action, ...]]:
    """What each hook of a steady step does; a hook is (fetch before a forward or backward, else release; module).
    `found`: modules gathered before the first; `asked`: of how many hooks, from the first on, if not of all.

    Parameters of one module are gathered and released together, so a module stands for its non-persistent ones; only
    those of a leaf module are prefetched apart.
    """
    threshold, reuse_distance = config.persistence_threshold, config.max_reuse_distance
    sizes = {m: sum(c for c in counts if c > threshold) for m, counts in parameters.items()}
    totals = {m: sum(counts) for m, counts in parameters.items()}
    fetches = [module for fetch, module in hooks if fetch]
    queue = deque(
        (index, member)
        for index, module in enumerate(fetches)
        for member in leaves.members.get(module, (module,))
        if member in totals
    )
    passed, uses = _traversal(fetches, totals)
    available = set(found)
    inflight: dict[int, _Flight] = {}
    last_fetched_for: dict[int, int] = {}
    live = step_id = 0
    nothing: tuple[Action, ...] = ()
    actions: list[tuple[Action, ...]] = []
    # a step has tens of thousands of hooks: plain loops, since a comprehension costs more than one module's turn
    for fetch, module in islice(hooks, asked):
        members = leaves.members.get(module, (module,))
        if not fetch:
            gone: list[int] = []
            for member in members:
                if member in available and last_fetched_for.get(member, -1) <= step_id:
                    gone.append(member)
            if not gone:
                actions.append(nothing)
                continue
            if module in leaves.members:
                kept = _leaf_reused(fetches, step_id, module, totals, leaves, reuse_distance)
            else:
                kept = _reused(uses[module], passed, step_id, reuse_distance)
            if kept:
                actions.append(nothing)
                continue
            available.difference_update(gone)
            live -= sum([sizes[member] for member in gone])
            actions.append(tuple([Action(False, member, sizes[member]) for member in gone]))
            continue
        missing: list[int] = []
        waiting: set[int] = set()
        for member in members:
            if member in totals:
                if sizes[member] and member not in available:
                    missing.append(member)
                    live += sizes[member]
                if last_fetched_for.get(member, -1) < step_id:
                    waiting.add(member)
        available.update(missing)
        done = _gathered(missing, sizes) if missing else []
        if inflight:
            for member in members:
                if member in inflight:
                    done += inflight.pop(member).met(member, sizes)
        while queue and waiting:
            index, popped = queue.popleft()
            last_fetched_for[popped] = index
            waiting.discard(popped)
        room = min(config.max_live - live, config.prefetch_bucket)
        prefetching = 0
        ahead: list[int] = []
        while queue and prefetching < room:
            index, module_ahead = queue.popleft()
            if last_fetched_for.get(module_ahead, -1) < index:
                last_fetched_for[module_ahead] = index
            if sizes[module_ahead] and module_ahead not in available:
                available.add(module_ahead)
                prefetching += sizes[module_ahead]
                ahead.append(module_ahead)
        live += prefetching
        if len(ahead) == 1:
            done.append(Action(True, ahead[0], prefetching))
        elif ahead:
            done.append(Action(True, ahead[-1], prefetching, flat=True))
            flight = _Flight(tuple(ahead), set(ahead))
            inflight |= dict.fromkeys(ahead, flight)
        step_id += 1
        actions.append(tuple(done) if done else nothing)
    return actions


@dataclass(slots=True)
class _Flight:
    """Parameters fetched in one call, ahead of use. The first that is met copies all out of the flat buffer, which
    goes with the last: the coordinator keeps the handle for each, and the handle the buffer."""

    members: tuple[int, ...]
    unmet: set[int]

    def met(self, member: int, sizes: Mapping[int, int]) -> list[Action]:
        first = len(self.unmet) == len(self.members)
        done = [Action(True, one, sizes[one], copied=True) for one in self.members] if first else []
        self.unmet.discard(member)
        if not self.unmet:
            done.append(Action(False, self.members[-1], sum(sizes[one] for one in self.members), flat=True))
        return done


def _gathered(members: Sequence[int], sizes: Mapping[int, int]) -> list[Action]:
    """Members gathered in one call and waited for at once: several arrive in a flat buffer and are copied out."""
    if len(members) == 1:
        return [Action(True, members[0], sizes[members[0]])]
    arrive = [Action(True, member, sizes[member], copied=True) for member in members]
    flat = Action(True, members[0], sum(sizes[member] for member in members), flat=True)
    return [flat, *arrive, flat._replace(appears=False)]


def left_gathered(actions: Sequence[tuple[Action, ...]]) -> frozenset[int]:
    """Modules that are gathered and not released."""
    left: set[int] = set()
    for done in actions:
        for action in done:
            if not action.flat:
                (left.add if action.appears else left.discard)(action.module)
    return frozenset(left)


def _traversal(fetches: Sequence[int], totals: Mapping[int, int]) -> tuple[list[int], dict[int, list[int]]]:
    """Elements passed before each fetch, and the fetches of each module. What is inside leaves is not looked into."""
    passed: list[int] = []
    uses: dict[int, list[int]] = {}
    total = 0
    for index, module in enumerate(fetches):
        passed.append(total)
        if module in totals:
            total += totals[module]
            uses.setdefault(module, []).append(index)
    passed.append(total)
    return passed, uses


def _leaf_reused(
    fetches: Sequence[int], step_id: int, leaf: int, totals: Mapping[int, int], leaves: Leaves, distance: int
) -> bool:
    """The same for a leaf, for which every module met counts with all that is inside it
    (partitioned_param_coordinator.py:555 asks whether the module to release is a leaf)."""
    total = 0
    for module in islice(fetches, step_id, None):
        if total >= distance:
            return False
        if module == leaf or leaves.containers.get(module) == leaf:
            return True
        total += leaves.elements.get(module) or totals.get(module, 0)
    return False


def _reused(uses: Sequence[int], passed: Sequence[int], step_id: int, distance: int) -> bool:
    """From fetch `step_id` on, is the module met before `distance` elements have been passed?"""
    for index in uses:
        if index >= step_id:
            return passed[index] - passed[step_id] < distance
    return False


def retraced(
    passes: Sequence[Sequence[tuple[bool, int]]],
    parameters: Mapping[int, tuple[int, ...]],
    config: CoordinatorConfig,
    leaves: Leaves = NO_LEAVES,
    found: frozenset[int] = frozenset(),
) -> list[tuple[Action, ...]]:
    """What each hook does where one engine is forwarded several times a step, as the policy is whose adapters are off
    in the reference. To the coordinator each forward is a step (reset_step): one is recorded, the next is compared
    with the record and fetches ahead as long as it agrees; then it lets go of what has come too early and of the
    record, and the one after that is recorded again. Without a whole record small parameters don't stay either
    (release_sub_module)."""
    config = replace(config, persistence_threshold=0)
    sizes = {module: sum(counts) for module, counts in parameters.items()}
    mode, record = "invalid", list[int]()
    actions: list[tuple[Action, ...]] = []
    for _ in range(2):  # the first step finds no record
        actions, available = [], found
        for hooks in passes:
            mode = {"invalid": "record", "record": "complete"}.get(mode, mode)
            cut = _agreement(hooks, record) if mode == "complete" else 0
            rest = [(True, module) for module in record[sum(fetch for fetch, _ in hooks[:cut]) :]]
            done = coordinate([*hooks[:cut], *rest], parameters, config, leaves, available, cut) if cut else []
            if cut < len(hooks):
                early = _came_early(hooks[:cut], done, sizes)
                still = left_gathered([*((Action(True, m, sizes[m]),) for m in sorted(available)), *done, early])
                others = untraced(hooks[cut:], sizes, leaves, still)
                done = [*done, (*early, *others[0]), *others[1:]]
                mode = "invalid" if mode == "complete" else mode
            if mode == "record":
                record = [module for fetch, module in hooks if fetch]
            actions += done
            available = left_gathered([*((Action(True, m, sizes[m]),) for m in sorted(available)), *done])
        if mode == "invalid":
            break  # the next step begins as this one did
    return actions


def _agreement(hooks: Sequence[tuple[bool, int]], record: Sequence[int]) -> int:
    """How many hooks there are before the first fetch that is not what was recorded."""
    fetched = 0
    for index, (fetch, module) in enumerate(hooks):
        if fetch:
            if fetched >= len(record) or record[fetched] != module:
                return index
            fetched += 1
    return len(hooks)


def _came_early(
    hooks: Sequence[tuple[bool, int]], actions: Sequence[tuple[Action, ...]], sizes: Mapping[int, int]
) -> tuple[Action, ...]:
    """_clean_inflight_param_registry: what was fetched ahead and not met is waited for, which copies it out of flat
    buffers, and goes; the flat buffers last."""
    met: set[int] = set()
    gathered: dict[int, int] = {}
    flats: dict[int, int] = {}
    for (fetch, module), done in zip(hooks, actions, strict=True):
        for action in done:
            kind = flats if action.flat else gathered
            if action.appears:
                kind[action.module] = action.elements
            else:
                kind.pop(action.module, None)
        if fetch:
            met.add(module)
    gone = [Action(False, module, elements) for module, elements in gathered.items() if module not in met]
    for module, elements in flats.items():
        if module not in gathered:  # none of it met: copied out only now
            gone += [Action(True, module, elements, copied=True), Action(False, module, elements)]
    return (*gone, *(Action(False, module, elements, flat=True) for module, elements in flats.items()))


def untraced(
    hooks: Sequence[tuple[bool, int]],
    sizes: Mapping[int, int],
    leaves: Leaves = NO_LEAVES,
    found: frozenset[int] = frozenset(),
) -> list[tuple[Action, ...]]:
    """A step without a complete trace: no prefetch, release at once. `sizes`: elements of each module that move."""
    available = set(found)
    actions: list[tuple[Action, ...]] = []
    for fetch, module in hooks:
        moving: list[int] = []
        for member in leaves.members.get(module, (module,)):
            if sizes.get(member) and fetch != (member in available):
                moving.append(member)
        if not moving:
            actions.append(())
        elif fetch:
            available.update(moving)
            actions.append(tuple(_gathered(moving, sizes)))
        else:
            available.difference_update(moving)
            actions.append(tuple(Action(False, member, sizes[member]) for member in moving))
    return actions
