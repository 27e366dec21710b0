"""Folds an event program into peaks: per phase, space and category, exact, without unrolling repeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dpofit.memory.program import Event, Phase, Program, Repeat


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at once in one space during one phase, and what they were."""

    phase: str
    step: int
    size_bytes: int
    breakdown: Mapping[str, int] = field(default_factory=dict)  # category → bytes at that moment


def phase_peaks(program: Program, spaces: frozenset[str]) -> list[Peak]:
    """One peak per phase, counting all events whose space is in `spaces`.

    A Repeat whose net effect grows peaks in its last iteration, else in its first: exact, since every iteration
    allocates and frees the same bytes.
    """
    live = 0
    categories: dict[str, int] = defaultdict(int)
    peaks = []
    for phase in program.phases:
        best = _Best(live, dict(categories))
        for item in phase.items:
            if isinstance(item, Event):
                if item.space in spaces:
                    live += item.size_bytes
                    categories[item.category] += item.size_bytes
                    if live > best.size_bytes:
                        best = _Best(live, dict(categories))
            else:
                live = _repeat(item, spaces, live, categories, best)
        peaks.append(Peak(phase.name, phase.step, best.size_bytes, {k: v for k, v in best.categories.items() if v}))
    return peaks


@dataclass(slots=True)
class _Best:
    size_bytes: int
    categories: dict[str, int]


def _repeat(item: Repeat, spaces: frozenset[str], live: int, categories: dict[str, int], best: _Best) -> int:
    inside = top = top_at = 0
    for index, event in enumerate(item.events):
        if event.space in spaces:
            inside += event.size_bytes
            if inside > top:
                top, top_at = inside, index + 1
    before = max(0, inside) * (item.times - 1)  # whole iterations already behind the highest one
    if live + before + top > best.size_bytes:
        best.size_bytes = live + before + top
        best.categories = dict(categories)
        at_top = _sum(item, spaces, top_at)
        per_iteration = _sum(item, spaces, len(item.events)) if inside > 0 else {}
        for category, size_bytes in at_top.items():
            best.categories[category] = best.categories.get(category, 0) + size_bytes
        for category, size_bytes in per_iteration.items():
            best.categories[category] = best.categories.get(category, 0) + size_bytes * (item.times - 1)
    for category, size_bytes in _sum(item, spaces, len(item.events)).items():
        categories[category] += size_bytes * item.times
    return live + inside * item.times


def _sum(item: Repeat, spaces: frozenset[str], stop: int) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for event in item.events[:stop]:
        if event.space in spaces:
            total[event.category] += event.size_bytes
    return total


def highest(peaks: list[Peak]) -> Peak:
    """The peak of all phases; the earliest of equals."""
    return max(peaks, key=lambda peak: peak.size_bytes)


def live_at_end(phases: tuple[Phase, ...], space: str) -> int:
    """Bytes of `space` still alive after the phases."""
    total = 0
    for phase in phases:
        for item in phase.items:
            events = (item,) if isinstance(item, Event) else item.events
            times = 1 if isinstance(item, Event) else item.times
            total += times * sum(event.size_bytes for event in events if event.space == space)
    return total
