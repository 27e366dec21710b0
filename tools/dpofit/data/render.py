"""The report of `dpofit data` as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from dpofit.data.check import Pass
from dpofit.data.checks import DataFinding
from dpofit.data.fix import FixReport
from dpofit.data.lengths import QUANTILES
from dpofit.findings import findings_json

COLUMNS = ("prompt", "chosen", "rejected", "row")
NAMES = ("p50", "p90", "p99", "p99.9", "max")
MARKS = {"error": "[bold red]error[/]", "warning": "[yellow]warning[/]", "info": "[cyan]info[/]"}


def as_json(
    run: Pass, found: list[DataFinding], basis: str, cutoff_len: int | None, fixed: FixReport | None
) -> dict[str, Any]:
    """The dpofit.data/1 document."""
    from dataclasses import asdict

    assert len(NAMES) == len(QUANTILES)
    lengths: dict[str, Any] = {"basis": basis, "exact": run.lengths.all_exact, "cutoff_len": cutoff_len}
    if run.pairs:
        for column in COLUMNS:
            distribution = run.lengths.distribution(column)
            quantiles = dict(zip(NAMES, distribution.quantiles, strict=True))
            lengths[f"{column}_tokens"] = {"mean": round(distribution.mean, 1), **quantiles}
    files = [{"file": str(facts.path), "rows": facts.rows} for facts in run.files]
    return findings_json(
        "data",
        found,
        rows=run.rows,
        pairs=run.pairs,
        files=files,
        lengths=lengths,
        fixed=asdict(fixed) if fixed else None,
    )


def print_report(run: Pass, found: list[DataFinding], name: str, basis: str, fixed: FixReport | None) -> None:
    """Tables of at most 100 columns on stdout."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=min(100, Console().width), highlight=False)
    console.print(f"[bold]{escape(name)}[/]: {run.rows:,} rows, {run.pairs:,} pairs")
    if run.pairs:
        table = Table(title=f"tokens, {escape(basis)}", title_justify="left", title_style="dim")
        table.add_column("")
        for heading in ("mean", *NAMES):
            table.add_column(heading, justify="right")
        for column in COLUMNS:
            distribution = run.lengths.distribution(column)
            label = {"row": "row (prompt + longer answer)"}.get(column, column)
            table.add_row(label, f"{distribution.mean:,.0f}", *(f"{value:,}" for value in distribution.quantiles))
        console.print(table)
    for finding in found:
        console.print()
        console.print(f"{MARKS[finding.severity]} [bold]{escape(finding.title)}[/]  [dim]{finding.id}[/]")
        for evidence in finding.evidence:
            console.print(f"    {escape(evidence.where)}: {escape(evidence.text)}")
        if finding.rows > len(finding.evidence) > 1:
            console.print(f"    … {finding.rows:,} in all", style="dim")
        console.print(f"  why: {escape(finding.cause)}")
        if finding.entry:
            console.print(f"  fix: {escape(finding.fix.split(': {', 1)[0])}:")
            entry = json.dumps(finding.entry, indent=2, ensure_ascii=False)
            console.print("\n".join(f"    {line}" for line in entry.splitlines()), markup=False)
        else:
            console.print(f"  fix: {escape(finding.fix)}")
        console.print(f"  sure: {finding.confidence}, from {escape(finding.basis)}", style="dim")
    if not found:
        console.print("\nno findings")
    if fixed is not None:
        _print_fixed(console, fixed)


def _print_fixed(console: Any, fixed: FixReport) -> None:
    from rich.markup import escape

    folder = fixed.train_with["dataset_dir"]
    console.print(f"\n[bold]{fixed.pairs_written:,} of {fixed.rows_read:,} rows[/] written to {escape(folder)}")
    for reason, count in sorted(fixed.left_out.items(), key=lambda item: -item[1]):
        console.print(f"    left out: {count:,} ({escape(reason)})")
    if fixed.answers_capped:
        console.print(f"    pairs with a capped answer: {fixed.answers_capped:,}")
    console.print(f"    order: {fixed.order}" + (f" (seed {fixed.seed})" if fixed.order == "shuffle" else ""))
    keys = "  ".join(
        f"{key}: {str(value).lower() if value is True else value}" for key, value in fixed.train_with.items()
    )
    console.print(f"    train with  {escape(keys)}")
