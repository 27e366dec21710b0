"""Draws memory over the traced steps, stacked by category, with the peak and what was alive there."""

from __future__ import annotations

import html
import json
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.memory.program import Program
from dpofit.trace.timeline_page import PAGE
from dpofit.units import GIB

_COLOURS = (
    "#4e79a7", "#a0cbe8", "#59a14f", "#8cd17d", "#f1ce63", "#e15759", "#ff9d9a", "#b07aa1", "#9c755f", "#bab0ac",
    "#499894", "#d37295",
)  # fmt: skip
_LABELS = 8  # tensors named at the peak
_POINTS = 4000  # most that are drawn; each stands for the highest of its neighbours


class Timeline:
    """Bytes of each category after every event of one space, the peak, and the tags alive there."""

    def __init__(self, program: Program, space: str = "gpu"):
        totals: dict[str, int] = {}
        alive: dict[str, tuple[int, str]] = {}
        self.points: list[dict[str, int]] = []
        self.phases: list[tuple[int, str]] = []  # (first event, "phase step")
        self.peak_bytes, self.peak_at = 0, 0
        self.alive_at_peak: list[tuple[int, str, str]] = []  # (bytes, category, tag)
        label = ""
        for phase, tag, event in program.events():
            if event.space != space:
                continue
            if f"{phase.name} {phase.step}" != label:
                label = f"{phase.name} {phase.step}"
                self.phases.append((len(self.points), label))
            totals[event.category] = totals.get(event.category, 0) + event.size_bytes
            if event.size_bytes > 0:
                alive[tag] = (event.size_bytes, event.category)
            else:
                alive.pop(tag, None)
            self.points.append(dict(totals))
            if sum(totals.values()) > self.peak_bytes:
                self.peak_bytes, self.peak_at = sum(totals.values()), len(self.points) - 1
                self.alive_at_peak = [(size, category, name) for name, (size, category) in alive.items()]
        self.alive_at_peak.sort(reverse=True)
        self._thin()
        self.categories = sorted(totals, key=lambda name: -max(point.get(name, 0) for point in self.points))

    def _thin(self) -> None:
        width = -(-len(self.points) // _POINTS)
        if width <= 1:
            return
        kept = [
            max(self.points[start : start + width], key=lambda point: sum(point.values()))
            for start in range(0, len(self.points), width)
        ]
        self.points = kept
        self.phases = [(position // width, label) for position, label in self.phases]
        self.peak_at //= width


def draw_timeline(program: Program, path: Path, title: str) -> None:
    """Write `path` (.html needs nothing, .png and .svg need matplotlib). Raises BadInput for another suffix."""
    timeline = Timeline(program)
    if path.suffix == ".html":
        path.write_text(_html(timeline, title))
    elif path.suffix in (".png", ".svg"):
        _image(timeline, path, title)
    else:
        raise BadInput([Problem("command line", "--timeline", f"{path.name} is no .html, .png or .svg", "name one")])


def _peak_lines(timeline: Timeline) -> list[str]:
    lines = [f"peak {timeline.peak_bytes / GIB:.2f} GiB"]
    for size, category, tag in timeline.alive_at_peak[:_LABELS]:
        _, op, module = [*tag.split(":", 2), "", ""][:3]
        lines.append(f"{size / GIB:6.2f} GiB {category}: {op} {module}")
    return lines


def _image(timeline: Timeline, path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 6), dpi=120)
    x = range(len(timeline.points))
    series = [[point.get(name, 0) / GIB for point in timeline.points] for name in timeline.categories]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(series))]
    axes.stackplot(x, series, labels=timeline.categories, colors=colours, step="post")
    top = timeline.peak_bytes / GIB
    axes.set_ylim(0, top * 1.12)
    for position, label in timeline.phases:
        axes.axvline(position, color="black", linewidth=0.4)
        axes.text(position, top * 1.11, label, fontsize=6, rotation=90, va="top")
    side = "left" if timeline.peak_at < len(timeline.points) / 2 else "right"
    axes.annotate(
        "\n".join(_peak_lines(timeline)), (timeline.peak_at, top),
        (0.02 if side == "right" else 0.98, 0.86), textcoords="axes fraction", fontsize=6, family="monospace", va="top",
        ha="left" if side == "right" else "right", arrowprops={"arrowstyle": "->"},
        bbox={"boxstyle": "round", "facecolor": "white", "alpha": 0.85},
    )  # fmt: skip
    axes.set_xlabel("allocations and frees, in order")
    axes.set_ylabel("allocated, GiB")
    axes.set_title(title)
    axes.legend(loc="lower center", ncol=6, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _html(timeline: Timeline, title: str) -> str:
    data = {
        "categories": timeline.categories,
        "colours": [_COLOURS[i % len(_COLOURS)] for i in range(len(timeline.categories))],
        "points": [[round(point.get(name, 0) / GIB, 4) for name in timeline.categories] for point in timeline.points],
        "phases": timeline.phases,
        "peak": [timeline.peak_at, timeline.peak_bytes / GIB],
    }
    peak = html.escape("\n".join(_peak_lines(timeline)))
    blob = json.dumps(data).replace("</", "<\\/")  # module paths come from a model's own names
    return PAGE.replace("@TITLE@", html.escape(title)).replace("@PEAK@", peak).replace("@DATA@", blob)
