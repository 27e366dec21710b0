"""Plots: memory by phase against the card, and memory against length for each recipe. Needs the `plot` extra."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.memory.limits import STEP_TOKENS, AllocatedBySteps, at_prompt
from dpofit.memory.predict import Prediction, predict
from dpofit.memory.step import plan_steps
from dpofit.report.rows import ComparisonRow
from dpofit.units import GIB

SUFFIXES = (".png", ".svg")
# One colour a category, the same in every plot.
COLOURS = {
    "weights": "#4c72b0", "reference": "#8c8cc4", "optimizer": "#55a868", "gradients": "#8fbc8f",
    "checkpoints": "#dd8452", "logits": "#c44e52", "activations": "#e6b84c", "activation_grads": "#f0d58c",
    "gathered": "#64b5cd", "buckets": "#a6cee3", "optimizer_workspace": "#b2df8a", "autocast_cache": "#937860",
    "attention_mask": "#da8bc3", "attention_scores": "#b279a2", "load": "#8c8c8c",
}  # fmt: skip
OTHER = "#bfbfbf"


def plot_phases(prediction: Prediction, path: Path, force: bool) -> None:
    """Stacked allocated memory of each phase, what is reserved, and the card's capacity."""
    plt = _pyplot(path, force)
    gpu, job = prediction.gpu, prediction.job
    names = list(gpu.phases)
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    categories = sorted({c for peak in gpu.phases.values() for c in peak.breakdown},
                        key=lambda c: -max(peak.breakdown.get(c, 0) for peak in gpu.phases.values()))  # fmt: skip
    floor = [0.0] * len(names)
    for category in categories:
        heights = [gpu.phases[name].breakdown.get(category, 0) / GIB for name in names]
        if max(heights) < gpu.capacity_bytes / GIB / 500:
            continue
        axes.bar(names, heights, bottom=floor, color=COLOURS.get(category, OTHER), label=category.replace("_", " "))
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    beside = gpu.overhead.total_bytes / GIB
    reserved = [(gpu.reserved.phases.get(name, 0)) / GIB + beside for name in names]
    axes.plot(names, reserved, "k_", markersize=26, label="reserved + context")
    axes.axhline(gpu.capacity_bytes / GIB, color="black", linewidth=1, linestyle="--", label=job.cluster.gpu.name)
    axes.set_ylabel("GiB of one GPU")
    tokens = f"{job.rows} rows x {job.row_tokens:,} tokens"
    axes.set_title(f"{job.recipe.name}: {tokens}, {job.world_size} GPUs, {prediction.verdict}", fontsize=10)
    plt.setp(axes.get_xticklabels(), rotation=20, ha="right")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _save(figure, path)
    plt.close(figure)


def plot_lengths(rows: Sequence[ComparisonRow], path: Path, force: bool) -> None:
    """GPU memory against prompt length for each recipe, the card's capacity, longest prompts and documented limits."""
    plt = _pyplot(path, force)
    figure, axes = plt.subplots(figsize=(9, 5.4), layout="constrained")
    longest = max([row.limit.limit.not_oom_prompt_tokens or 0 for row in rows] + [4096])
    last = int(longest * 1.25) // STEP_TOKENS
    for index, row in enumerate(rows):
        prompts, peaks = _curve(row, last)
        colour = f"C{index % 10}"
        style = ("-", "--", ":")[index // 10 % 3]
        name = row.planned.job.recipe.name.rpartition("/")[2]
        axes.plot(prompts, peaks, style, color=colour, linewidth=1.4, label=name)
        limit = row.limit.limit.prompt_tokens
        if limit is not None:
            axes.plot([limit], [_at(prompts, peaks, limit)], "o", color=colour, markersize=4)
        written = row.planned.written_for
        if written is not None and written.documented_prompt_tokens is not None:
            axes.axvline(written.documented_prompt_tokens, color=colour, linewidth=0.8, linestyle="-.")
            axes.annotate(f"documented {written.documented_prompt_tokens:,}", (written.documented_prompt_tokens, 1),
                          rotation=90, fontsize=7, color=colour, ha="right", va="bottom")  # fmt: skip
    for capacity, name in dict.fromkeys(
        (row.prediction.gpu.capacity_bytes, row.prediction.job.cluster.gpu.name) for row in rows
    ):
        axes.axhline(capacity / GIB, color="black", linewidth=1, linestyle="--")
        axes.annotate(name, (last * STEP_TOKENS, capacity / GIB), fontsize=8, ha="right", va="bottom")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("GiB of one GPU (reserved + context)")
    axes.set_xlim(0, last * STEP_TOKENS)
    axes.set_ylim(0, 1.35 * max(row.prediction.gpu.capacity_bytes for row in rows) / GIB)
    axes.set_title("Memory against prompt length; dots: longest prompt that fits", fontsize=10)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _save(figure, path)
    plt.close(figure)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        wrong = f"cannot be written ({error.strerror})"
        raise BadInput(Problem(str(path), "--plot", wrong, "Name another file")) from None


def _curve(row: ComparisonRow, last: int, points: int = 9) -> tuple[list[int], list[float]]:
    """Allocated bytes at a few lengths, with the bytes beside them that the row's own prediction has."""
    searched = row.limit.planned.job
    plan, prompt = plan_steps(searched), row.limit.limit.prompt_tokens
    allocated = AllocatedBySteps(searched, plan)
    prediction = row.prediction if prompt is None else predict(at_prompt(searched, prompt), plan=plan)
    gap = prediction.gpu.reserved.peak_bytes / prediction.gpu.allocated_bytes
    beside = prediction.gpu.overhead.total_bytes
    steps = [max(1, last * i // (points - 1)) for i in range(points)]
    return [step * STEP_TOKENS for step in steps], [(allocated(step) * gap + beside) / GIB for step in steps]


def _at(prompts: Sequence[int], peaks: Sequence[float], prompt: int) -> float:
    for (x0, y0), (x1, y1) in zip(zip(prompts, peaks, strict=True), zip(prompts[1:], peaks[1:], strict=True),
                                  strict=False):  # fmt: skip
        if x0 <= prompt <= x1:
            return y0 + (y1 - y0) * (prompt - x0) / max(x1 - x0, 1)
    return peaks[-1]


def _pyplot(path: Path, force: bool) -> Any:
    """matplotlib's pyplot without a screen, once the file may be written."""
    problems = []
    if path.suffix.lower() not in SUFFIXES:
        problems.append(Problem(str(path), "--plot", f"{path.suffix or 'no suffix'} is not a picture we write",
                                f"Name a file ending in {' or '.join(SUFFIXES)}"))  # fmt: skip
    if os.path.exists(path) and not force:
        problems.append(Problem(str(path), "--plot", "exists already", "Name another file, or add --force"))
    if not os.path.isdir(path.parent):
        problems.append(Problem(str(path), "--plot", f"{path.parent} is no folder", "Make it first"))
    if problems:
        raise BadInput(problems)
    try:
        import matplotlib
    except ImportError:
        right = "Run, in dpofit's repository: pip install -e '.[plot]'"
        raise BadInput(Problem("command line", "--plot", "matplotlib is not installed", right)) from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt
