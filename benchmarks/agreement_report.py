"""What the grid of benchmarks/agreement.py says: the summary that docs/accuracy.md and README.md show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "agreement.json"
PEAK, PHASE = 0.01, 0.02
_PLAIN = {"pref_loss": "sigmoid", "checkpointing": "reentrant", "attention": "sdpa", "padded": True, "pairs": 1,
          "optim": "adamw_torch_fused", "liger": False, "pure_bf16": False, "tokens": 2048}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Agreement:
    """One point of the grid; errors are closed form / trace - 1."""

    name: str
    group: str
    of_peak: float
    worst_phase: str
    of_worst: float
    same_phase: bool
    commit: str  # of the code that gave both

    @property
    def agrees(self) -> bool:
        return abs(self.of_peak) <= PEAK and abs(self.of_worst) <= PHASE and self.same_phase


def errors(row: dict[str, Any]) -> tuple[float, str, float, bool]:
    """(relative error of the peak, worst phase, its error, same winning phase)."""
    predicted, traced = row["predicted_bytes"], row["traced_bytes"]
    of_phase = {name: predicted.get(name, 0) / traced[name] - 1 for name in traced}
    worst = max(of_phase, key=lambda name: abs(of_phase[name]))
    of_peak = max(predicted.values()) / max(traced.values()) - 1
    same = max(predicted, key=predicted.__getitem__) == max(traced, key=traced.__getitem__)
    return of_peak, worst, of_phase[worst], same


def read(path: Path = RESULTS) -> list[Agreement]:
    """The committed grid."""
    return [agreement_of(row) for row in json.loads(path.read_text(encoding="utf-8"))]


def agreement_of(row: dict[str, Any]) -> Agreement:
    point = row["point"]
    return Agreement(
        _name(point), f"{point['stage']} {point['finetuning']}, {point['zero']}", *errors(row), row["commit"]
    )


def _name(point: dict[str, Any]) -> str:
    """The point in words: what differs from a plain one."""
    odd = [f"{key}={point[key]}" for key, usual in _PLAIN.items() if point[key] != usual]
    odd += [f"{key}={value}" for key, value in point["recipe"]]
    plain = f"{point['model']} {point['stage']} {point['finetuning']} zero={point['zero']}"
    return " ".join([plain, *odd])


def sentence(points: Sequence[Agreement]) -> str:
    """One for README.md."""
    peak, phases, same = _counts(points)
    return (
        f"On a grid of {len(points)} jobs (benchmarks/results/agreement.json) closed form and trace give the same"
        f" allocated peak within 1 % at {peak}, every phase within 2 % at {phases}, the same winning phase at {same};"
        " docs/accuracy.md names the worst."
    )


def section(points: Sequence[Agreement]) -> str:
    """For docs/accuracy.md: by stage, finetuning and DeepSpeed stage, and every point beyond a bound."""
    groups: dict[str, list[Agreement]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    lines = [_line(name, members) for name, members in sorted(groups.items())]
    head = ["jobs", "n", "peak within 1 %", "every phase within 2 %", "same winning phase", "worst peak", "worst phase"]
    table = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines, _line("all", points))]
    beyond = sorted((point for point in points if not point.agrees), key=lambda point: -abs(point.of_worst))
    named = [f"- {p.name}: peak {p.of_peak:+.2%}, {p.worst_phase} {p.of_worst:+.2%}" for p in beyond]
    worst = _worst(points, lambda point: point.of_peak)
    text = (
        "Allocated bytes computed from shapes against the same step traced from LLaMA-Factory's own code on fake"
        " tensors (`python benchmarks/agreement.py`, 4 layers of each model; where ranks differ, the most of any)."
        f" Worst peak: {worst.name}, {worst.of_peak:+.2%}."
    )
    runs = Counter(point.commit for point in points)
    text += " Run at " + ", ".join(f"{commit} ({count})" for commit, count in sorted(runs.items())) + "."
    return "\n\n".join([text, "\n".join(table), "Beyond a bound:" if named else "None is beyond a bound.", *(
        ["\n".join(named)] if named else [])])  # fmt: skip


def _counts(points: Iterable[Agreement]) -> tuple[int, int, int]:
    points = list(points)
    return (
        sum(abs(point.of_peak) <= PEAK for point in points),
        sum(abs(point.of_worst) <= PHASE for point in points),
        sum(point.same_phase for point in points),
    )


def _line(name: str, points: Sequence[Agreement]) -> list[str]:
    peak, worst = _worst(points, lambda point: point.of_peak), _worst(points, lambda point: point.of_worst)
    counts = [str(count) for count in _counts(points)]
    return [name, str(len(points)), *counts, f"{peak.of_peak:+.2%}", f"{worst.worst_phase} {worst.of_worst:+.2%}"]


def _worst(points: Sequence[Agreement], error: Callable[[Agreement], float]) -> Agreement:
    return max(points, key=lambda point: abs(error(point)))
