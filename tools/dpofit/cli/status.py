"""`dpofit status`: whether a run is going on, how far it is, and how it ended."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dpofit.errors import BadInput, Problem


def command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The run folder.")] = Path("."),
    lines: Annotated[int, typer.Option("--lines", min=0, help="Lines of the log to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.status/1.")] = False,
) -> None:
    """The run that `dpofit launch` started from a folder on this host: pid, phase and step of each rank, loss, memory,
    the end of the log. Exit code 1 when it died.

    \b
    Examples:
      dpofit status runs/first
      dpofit status runs/first --lines 40
      dpofit status runs/first --json | jq .state
    """
    document = describe(folder.resolve(), lines)
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _print(document)
    raise typer.Exit(1 if document["state"] == "died" else 0)


def describe(folder: Path, lines: int) -> dict[str, Any]:
    """The `dpofit.status/1` document; `state` is running, finished or died."""
    from dpofit.launch.death import read_phases
    from dpofit.launch.plan import read_plan, state_folder
    from dpofit.launch.progress import last_lines, progress
    from dpofit.launch.state import last_run, outcome, running

    state = state_folder(folder)
    plan, last = read_plan(state), last_run(state)
    if plan is None or last is None:
        right = "Give the folder of the recipe; on another host, run this there."
        raise BadInput(Problem(str(folder), "DIR", "no run was started from here on this host", right))
    now, end = running(state), outcome(state)
    if now is not None:
        word = "running"
    elif end is not None:
        word = "finished" if end.ok else "died"
    else:
        word = "died"  # the supervisor itself was killed: nobody could write how it ended
    return {
        "schema": "dpofit.status/1",
        "state": word,
        "title": end.title if end else "running" if now else "the supervisor was killed, with all it supervised",
        "advice": end.advice if end else "",
        "recipe": plan.title,
        "pid": last.pid,
        "job_pid": last.job_pid,
        "seconds": round(time.time() - last.started) if now else None,
        "phases": [asdict(phase) for phase in read_phases(state)],
        "ranks": [asdict(rank) for rank in progress(plan.output_dir, since=last.started)],
        "output_dir": str(plan.output_dir),
        "log": last.log,
        "log_lines": last_lines(Path(last.log), lines) if last.log else [],
    }


def _print(document: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    running = f", pid {document['pid']}, for {document['seconds']:,} s" if document["state"] == "running" else ""
    print(f"{document['recipe']}: {document['state']}{running}")
    if document["state"] != "running":
        print(f"  {document['title']}")
        if document["advice"]:
            print(f"  {document['advice']}")
    for phase in document["phases"]:
        step = "" if phase["step"] is None else f" {phase['step']}"
        print(f"  local rank {phase['local_rank']}: {phase['phase']}{step}, {_ago(phase['time'])}")
    if document["ranks"]:
        table = Table("rank", "step", "loss", "GPU reserved", "host RSS", "read", box=box.SIMPLE)
        for rank in document["ranks"]:
            loss = "–" if rank["loss"] is None else f"{rank['loss']:.4f}"
            gpu, host = (_size(rank[key]) for key in ("gpu_reserved_peak_bytes", "host_rss_bytes"))
            table.add_row(str(rank["rank"]), str(rank["step"]), loss, gpu, host, _ago(rank["time"]))
        Console(width=100).print(table)
    if document["log"]:
        print(f"log: {document['log']}")
        for line in document["log_lines"]:
            print(f"  {line}")


def _size(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else f"{n_bytes / 2**30:.1f} GiB"


def _ago(then: float) -> str:
    return f"{max(0, time.time() - then):,.0f} s ago"
