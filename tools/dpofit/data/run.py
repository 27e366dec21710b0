"""`dpofit data` from argument to result: finds the data, passes over it, makes findings, writes what was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from dpofit.data.check import Pass, first_rows, total_bytes
from dpofit.data.checks import DataFinding
from dpofit.data.fix import FixPlan, FixReport, write_fixed
from dpofit.data.loading import Advance
from dpofit.data.policy import read_policy_view
from dpofit.data.remarks import PairRemarks
from dpofit.data.report import Context, findings
from dpofit.data.source import PEEK_ROWS, Source, find_source
from dpofit.data.spec import Dataset
from dpofit.data.suggest import suggest
from dpofit.data.templates import templates
from dpofit.data.tokens import Counter, counter_for
from dpofit.errors import BadInput, Problem

SAMPLE_PAIRS = 5_000  # pairs that the costly checks (near copies, style, edits) look at
UNREADABLE = {"data.column-absent", "data.not-ranked", "data.no-usable-rows", "data.format-unknown"}

# Called with a description and a number of bytes; gives a context whose value is told the bytes done.
Progress = Callable[[str, int], AbstractContextManager[Advance]]


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the command."""

    source: Source
    run: Pass
    findings: list[DataFinding]
    counter: Counter
    fixed: FixReport | None


def check_data(
    target: str,
    overrides: Sequence[str],
    progress: Progress,
    logps: Path | None = None,
    fix: tuple[Path, FixPlan] | None = None,
) -> Result:
    """Check, and with `fix` write. Raises BadInput."""
    source = find_source(target, overrides, lambda path: first_rows(path, PEEK_ROWS))
    settings = source.settings
    counter, why_estimated = counter_for(
        settings.template, settings.model_folder, settings.thinking, settings.default_system
    )
    remarks = PairRemarks(templates().get(settings.template or ""))

    def go_through(datasets: Sequence[Dataset], what: str) -> Pass:
        run = Pass(counter, remarks, settings.cutoff_len, SAMPLE_PAIRS)
        with progress(what, total_bytes(datasets)) as advance:
            for dataset in datasets:
                run.read(dataset, advance)
        return run

    run = go_through(source.datasets, "reading")
    evaluation = go_through(source.eval_datasets, "evaluation set") if source.eval_datasets else None
    policy = read_policy_view(logps, run) if logps is not None else None
    found = findings(run, evaluation, Context(settings.cutoff_len, why_estimated, settings.val_size, policy))
    if fix is None:
        return Result(source, run, found, counter, None)
    out, plan = fix
    datasets = source.datasets
    if UNREADABLE & {finding.id for finding in found}:
        datasets = tuple(_readable(dataset, run) for dataset in datasets)
        run = go_through(datasets, "reading again")
        if not run.pairs:
            right = "Give rows with a prompt, a chosen and a rejected answer"
            raise BadInput(Problem(source.name, "--fix", "no row can be made into a pair", right))
    with progress("writing", total_bytes(datasets)) as advance:
        plan = replace(plan, cutoff_len=settings.cutoff_len)
        fixed = write_fixed(source.datasets[0].name, datasets, run, counter, plan, out, advance)
    return Result(source, run, found, counter, fixed)


def _readable(dataset: Dataset, run: Pass) -> Dataset:
    """The data set under the mapping that gives pairs, rewriting its rows if none does."""
    rows = [row for facts in run.files if facts.dataset is dataset for row in facts.first_rows]
    found = suggest(rows)
    return dataset if found is None else replace(dataset, spec=found.spec, rewrites=found.rewrites)


def write_lengths(run: Pass, path: Path) -> None:
    """JSON lines {"prompt", "chosen", "rejected", "count"}: tokens after cutoff_len; what `predict --lengths` reads."""
    with path.open("w", encoding="utf-8") as file:
        for prompt, chosen, rejected, count in run.lengths.table():
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "count": count}
            file.write(json.dumps(row) + "\n")
