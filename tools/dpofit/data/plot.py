"""Histograms of the lengths of a data set, as one image."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpofit.data.lengths import LONG_ANSWER_TOKENS, LengthTable
from dpofit.errors import BadInput, Problem

FORMATS = ("png", "svg", "pdf", "jpg")


def check_plot(path: Path) -> None:
    """Raise BadInput when matplotlib is missing or the file's format is not one of FORMATS."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            Problem("--plot", None, "needs matplotlib", "Run, in dpofit's repository: pip install -e '.[plot]'")
        )
    if path.suffix.removeprefix(".") not in FORMATS:
        raise BadInput(Problem(str(path), "--plot", f"unknown format {path.suffix!r}", f"One of: {', '.join(FORMATS)}"))


def plot_lengths(table: LengthTable, title: str, basis: str, cutoff_len: int | None, path: Path) -> None:
    """Prompt, both answers, rows and the answers' difference in tokens, as trained; counts on a log scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    (prompts, answers), (rows, difference) = figure.subplots(2, 2)
    prompts.hist(table.prompt, bins=60, color="#4c72b0")
    prompts.set_title("prompt")
    top = max(int(table.chosen.max()), int(table.rejected.max()), 1)
    bins = np.linspace(0, top, 61).tolist()
    answers.hist(table.chosen, bins=bins, alpha=0.6, label="chosen", color="#55a868")
    answers.hist(table.rejected, bins=bins, alpha=0.6, label="rejected", color="#c44e52")
    answers.axvline(LONG_ANSWER_TOKENS, color="black", linestyle=":", label=f"{LONG_ANSWER_TOKENS:,}")
    answers.set_title("answers")
    answers.legend()
    rows.hist(table.row, bins=60, color="#8172b2")
    if cutoff_len:
        rows.axvline(cutoff_len, color="black", linestyle="--", label=f"cutoff_len {cutoff_len:,}")
        rows.legend()
    rows.set_title("row: prompt + longer answer")
    difference.hist(table.chosen - table.rejected, bins=61, color="#937860")
    difference.axvline(0, color="black", linewidth=0.8)
    difference.set_title("chosen - rejected")
    for axes in (prompts, answers, rows, difference):
        axes.set_yscale("log", nonpositive="clip")
        axes.set_xlabel("tokens")
        axes.set_ylabel("pairs")
    figure.suptitle(f"{title}: {len(table):,} pairs ({basis})", fontsize=10)
    figure.savefig(path)
