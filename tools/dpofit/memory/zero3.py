"""ZeRO-3's parameter coordinator on module names: which parameters are gathered and released at every hook.

Models deepspeed 0.18.4 runtime/zero/partitioned_param_coordinator.py and parameter_offload.py. The order of hooks is
the tape's; a module without parameters counts too, since every pre-hook prefetches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Module(NamedTuple):
    """A module instance: its layer (None outside the decoder stack) and its name."""

    layer: int | None
    name: str


class Hook(NamedTuple):
    """One coordinator call: `fetch` before a module's forward or backward, `release` after it."""

    fetch: bool
    module: Module


class Action(NamedTuple):
    """A buffer of `elements` parameters appears or goes: a module's own, or `flat`, the one that several parameters
    fetched in one call arrive in and are copied out of (partition_parameters.py AllGatherCoalescedHandle.wait)."""

    appears: bool
    module: Module
    elements: int
    flat: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Sizes in elements, `auto` resolved."""

    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    persistence_threshold: int


def coordinate(
    hooks: Sequence[Hook],
    parameters: Mapping[Module, tuple[int, ...]],
    config: CoordinatorConfig,
    traced: bool,
) -> tuple[list[list[Action]], int]:
    """What each hook does in a step, and how many elements stay gathered for good (persistent parameters).

    Parameters of one module are gathered and released together, so a module stands for its non-persistent ones.
    `traced` False is a step without a complete trace: no prefetch, release at once (the first step; every step of a
    LoRA run whose reference is the same module with adapters off, since the two forwards invalidate the trace).
    """
    sizes: dict[Module, int] = {}
    persistent = 0
    for module, counts in parameters.items():
        sizes[module] = sum(count for count in counts if count > config.persistence_threshold)
        persistent += sum(count for count in counts if count <= config.persistence_threshold)
    fetches = [hook.module for hook in hooks if hook.fetch]
    queue: deque[tuple[int, Module]] = deque((index, m) for index, m in enumerate(fetches) if parameters.get(m))
    traversal = _ReuseTraversal(fetches, parameters)
    available: set[Module] = set()
    inflight: dict[Module, tuple[Module, ...]] = {}
    last_fetched_for: dict[Module, int] = {}
    live = step_id = 0
    actions: list[list[Action]] = []
    for hook in hooks:
        done: list[Action] = []
        module, size = hook.module, sizes.get(hook.module, 0)
        if hook.fetch:
            if size and module not in available:
                available.add(module)
                live += size
                done.append(Action(True, module, size))
            elif module in inflight:
                group = inflight[module]
                for member in group:
                    del inflight[member]
                    done.append(Action(True, member, sizes[member]))
                done.append(Action(False, group[0], sum(sizes[member] for member in group), flat=True))
            if traced:
                if parameters.get(module) and last_fetched_for.get(module, -1) < step_id:
                    while queue:
                        index, popped = queue.popleft()
                        last_fetched_for[popped] = index
                        if popped == module:
                            break
                room = min(config.max_live - live, config.prefetch_bucket)
                prefetching = 0
                group_ahead: list[Module] = []
                while queue and prefetching < room:
                    index, ahead = queue.popleft()
                    last_fetched_for[ahead] = max(last_fetched_for.get(ahead, -1), index)
                    if sizes[ahead] and ahead not in available:
                        available.add(ahead)
                        prefetching += sizes[ahead]
                        group_ahead.append(ahead)
                live += prefetching
                if len(group_ahead) == 1:
                    done.append(Action(True, group_ahead[0], prefetching))
                elif group_ahead:
                    done.append(Action(True, group_ahead[0], prefetching, flat=True))
                    inflight.update(dict.fromkeys(group_ahead, tuple(group_ahead)))
            step_id += 1
        elif size and module in available:
            reused = traced and (
                last_fetched_for.get(module, -1) > step_id
                or traversal.reused(module, step_id, config.max_reuse_distance)
            )
            if not reused:
                available.discard(module)
                live -= size
                done.append(Action(False, module, size))
        actions.append(done)
    return actions, persistent


class _ReuseTraversal:
    """Answers: starting at fetch `step_id`, is `module` met before `distance` elements have been passed?"""

    def __init__(self, fetches: Sequence[Module], parameters: Mapping[Module, tuple[int, ...]]) -> None:
        self._passed = [0]
        self._uses: dict[Module, list[int]] = {}
        for index, module in enumerate(fetches):
            self._passed.append(self._passed[-1] + sum(parameters.get(module, ())))
            self._uses.setdefault(module, []).append(index)

    def reused(self, module: Module, step_id: int, distance: int) -> bool:
        for index in self._uses.get(module, ()):
            if index >= step_id:
                return self._passed[index] - self._passed[step_id] < distance
        return False
