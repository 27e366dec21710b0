"""`dpofit doctor LOG...`: what went wrong first in a training run, from its logs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

SHOW_PROGRESS_BYTES = 200_000_000  # about a second of reading


def command(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Log files, one or one per node; - is stdin.")],
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="RECIPE", help="The recipe that ran: its tensors and prediction.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.doctor/1.")] = False,
) -> None:
    """Say what went wrong first in a training run: the root cause with file and line, what it means, what to do.

    Reads logs of any size in one pass: of one or many nodes, gzip or plain, with the ranks' lines, progress bars and
    colours mixed up as they come. Give the logs of all nodes at once: the failure that counts is often on another one.
    What only follows from it (lost connections, time-outs, SIGTERM) is listed as such. A log without a known cause
    gets its most telling lines and exit code 0. docs/diagnoses.md lists everything that is known.

    Exit code 1 when a finding is an error.

    \b
    Examples:
      dpofit doctor train.log
      dpofit doctor node*.log.gz
      dpofit doctor train.log --recipe qwen2.5-72b-dpo/full-z3-liger-unsloth-gc
      kubectl logs trainer-0 | dpofit doctor - --json | jq -r '.findings[0].id'
    """
    from dpofit.doctor.diagnose import diagnose
    from dpofit.doctor.render import as_json as document_of
    from dpofit.doctor.render import print_report
    from dpofit.findings import exit_code

    with _progress(logs) as on_bytes:
        report = diagnose(logs, on_bytes)
    if recipe is not None:
        from dpofit.doctor.against_recipe import with_recipe

        report = with_recipe(report, recipe)
    if as_json:
        print(json.dumps(document_of(report), indent=2, ensure_ascii=False))
    else:
        print_report(report)
    raise typer.Exit(exit_code(report.findings))


@contextmanager
def _progress(logs: Sequence[str]) -> Iterator[Callable[[int], None]]:
    """A bar on stderr over the logs' bytes, for long reads on a terminal."""
    total = sum(Path(log).stat().st_size for log in logs if Path(log).is_file())
    if total < SHOW_PROGRESS_BYTES or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=total)
        yield lambda count: progress.advance(task, count)
