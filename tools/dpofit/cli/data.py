"""`dpofit data DATASET|RECIPE`: checks preference data as LLaMA-Factory will read it, and writes a repaired copy."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dpofit.errors import BadInput, Problem


class OutlierChoice(StrEnum):
    """What --fix does with pairs over the limits."""

    drop = "drop"
    cap = "cap"
    keep = "keep"


class OrderChoice(StrEnum):
    """The order in which --fix writes."""

    shuffle = "shuffle"
    longest_first = "longest-first"
    keep = "keep"


def command(
    target: Annotated[
        str, typer.Argument(metavar="DATASET|RECIPE", help="A data file or folder, a name, or a recipe.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys.")] = None,
    fix: Annotated[
        Path | None, typer.Option("--fix", metavar="OUT", help="Write the usable pairs to this folder.")
    ] = None,
    outliers: Annotated[OutlierChoice, typer.Option(help="With --fix: pairs over the limits.")] = OutlierChoice.drop,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="With --fix: most tokens of a prompt.")] = None,
    max_response: Annotated[int | None, typer.Option(min=2, help="With --fix: most tokens of an answer.")] = None,
    order: Annotated[OrderChoice, typer.Option(help="With --fix: order of the pairs.")] = OrderChoice.shuffle,
    seed: Annotated[int, typer.Option(help="With --fix: seed of the shuffle.")] = 42,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Histograms (png, svg, pdf, jpg).")] = None,
    lengths_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lengths for `dpofit predict --lengths`.")
    ] = None,
    logps: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Log-probabilities of the policy, JSON lines.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at OUT and FILE.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.data/1.")] = False,
) -> None:
    """Check preference data as LLaMA-Factory will read it: what is dropped, cut or misread, and what sets the peak.

    DATASET is a JSON, JSONL, Parquet, Arrow or CSV file (its dataset_info.json is looked up beside it, else the format
    is guessed), a folder of such files, or a name in the dataset_info.json of dataset_dir=DIR. KEY=VALUE are keys of a
    recipe that decide how data is read: template, cutoff_len, model_name_or_path (a local folder makes token counts
    exact), dataset_dir, eval_dataset, val_size, default_system, enable_thinking, preserve_thinking.

    --fix leaves out pairs that are unusable, repeated or contradictory, and those over cutoff_len, --max-prompt or
    --max-response (cap cuts the answers instead), and never touches the input. --logps has a line per row:
    {"row": 17, "chosen": -210.4, "rejected": -95.1}, summed over the answer's tokens by the policy before training.

    Exit code 1 when a finding is an error: training would stop, or get no data. docs/data-checks.md lists the checks.

    \b
    Examples:
      dpofit data pairs.jsonl
      dpofit data my_run.yaml cutoff_len=9216 --plot lengths.png
      dpofit data pairs.json template=qwen cutoff_len=9216 model_name_or_path=/models/Qwen2.5-72B-Instruct
      dpofit data my_pairs dataset_dir=data --lengths-out lengths.jsonl
      dpofit data pairs.json --fix cleaned --max-response 1024 --order longest-first
    """
    from dpofit.data import require_extra

    require_extra()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # data may hold what no encoding can print
    _refuse_unused(fix, outliers, max_prompt, max_response)
    _refuse_existing([path for path in (plot, lengths_out) if path is not None], force)

    from dpofit.data.fix import FixPlan, check_out_folder
    from dpofit.data.plot import check_plot, plot_lengths
    from dpofit.data.render import as_json as document_of
    from dpofit.data.render import print_report
    from dpofit.data.run import check_data, write_lengths
    from dpofit.findings import exit_code

    if plot is not None:
        check_plot(plot)
    to_fix = None
    if fix is not None:
        check_out_folder(fix, force)
        to_fix = (fix, FixPlan(outliers.value, max_prompt, max_response, None, order.value, seed))
    result = check_data(target, overrides or [], _progress, logps, to_fix)
    cutoff_len = result.source.settings.cutoff_len
    basis = result.counter.basis
    if not result.run.pairs:
        for path in (lengths_out, plot):
            if path is not None:
                print(f"no pairs, so {path} is not written", file=sys.stderr)
    else:
        if lengths_out is not None:
            write_lengths(result.run, lengths_out)
        if plot is not None:
            plot_lengths(result.run.lengths, result.source.name, basis, cutoff_len, plot)
    if as_json:
        document = document_of(result.run, result.findings, basis, cutoff_len, result.fixed)
        print(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        print_report(result.run, result.findings, result.source.name, basis, result.fixed)
    raise SystemExit(exit_code(result.findings))


def _refuse_unused(fix: Path | None, outliers: OutlierChoice, max_prompt: int | None, max_response: int | None) -> None:
    """Limits without --fix would be silently ignored."""
    given = {"--max-prompt": max_prompt, "--max-response": max_response}
    names = [name for name, value in given.items() if value is not None]
    if outliers is not OutlierChoice.drop:
        names.append("--outliers")
    if fix is None and names:
        raise BadInput([Problem("command line", name, "works only with --fix", "Add --fix OUT") for name in names])


def _refuse_existing(paths: list[Path], force: bool) -> None:
    problems = [Problem(str(path), None, "exists", "Add --force to replace it") for path in paths if path.exists()]
    problems = [] if force else problems
    problems += [
        Problem(str(path), None, f"there is no folder {path.parent}", "Make it first")
        for path in paths
        if not path.absolute().parent.is_dir()
    ]
    if problems:
        raise BadInput(problems)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr, in bytes read; none when stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
