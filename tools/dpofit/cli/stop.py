"""`dpofit stop`: saves, then ends a run, on all its nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dpofit.errors import BadInput, Problem


def command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The run folder.")] = Path("."),
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the save and the end.")] = 1800.0,
    now: Annotated[
        bool, typer.Option("--now", help="Don't wait for a step or a save: SIGTERM, SIGKILL 30 s later.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.stop/1.")] = False,
) -> None:
    """Stop a run that `dpofit launch` started on this host. One node is enough: all nodes save and end together.

    Training looks for the request after each optimizer step, saves a checkpoint and ends; while the model is still
    loading, or tokenizing, nothing looks: --now ends it all the same. Exit code 1 when it still runs after --wait.

    \b
    Examples:
      dpofit stop runs/first
      dpofit stop runs/first --wait 60
      dpofit stop runs/first --now
    """
    from dpofit.launch import stop
    from dpofit.launch.plan import state_folder
    from dpofit.launch.state import last_run, outcome, running

    state = state_folder(folder.resolve())
    found = running(state)
    if found is None:
        if last_run(state) is None:
            right = "Give the folder of the recipe; on another host, run this there."
            raise BadInput(Problem(str(folder), "DIR", "no run was started from here on this host", right))
        ended, title = True, "no run is going on"
    else:
        stop.ask_to_stop(state)
        if now:
            stop.end_now(found)
        if not as_json:
            print(f"asked pid {found.pid} to {'end' if now else 'save and end'}", file=sys.stderr, flush=True)
        ended = stop.wait_for_end(found, wait_s)
        end = outcome(state)
        title = "still running" if not ended else end.title if end is not None else "ended"
    if as_json:
        print(json.dumps({"schema": "dpofit.stop/1", "ended": ended, "title": title}))
    else:
        print(title)
    raise typer.Exit(0 if ended else 1)
