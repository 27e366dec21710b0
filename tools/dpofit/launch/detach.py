"""Starts a run that outlives its terminal: a supervisor in a session of its own, with a log instead of a screen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from dpofit.launch.plan import Plan, read_plan, write_plan
from dpofit.launch.state import LOG_FILE, clear_run_files, running


def start_detached(plan: Plan) -> tuple[int, Path]:
    """`(pid of the supervisor, its log)`, once it has taken over. OSError if it ends before that.

    torchrun replaces nohup's "ignore SIGHUP" by a handler that ends the job, so a closing terminal kills it; a
    process in another session gets no SIGHUP from the terminal at all (setsid(2)).
    """
    clear_run_files(plan.state)
    write_plan(plan)
    log = plan.state / LOG_FILE
    if log.exists():
        log.replace(log.with_name(f"{LOG_FILE}.previous"))
    with log.open("ab", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dpofit.launch.detach", str(plan.state)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ,
        )  # fmt: skip
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if (found := running(plan.state)) is not None and found.pid == process.pid:
            return process.pid, log
        if process.poll() is not None:
            raise OSError(f"the supervisor ended at once with exit code {process.returncode}; see {log}")
        time.sleep(0.05)
    raise OSError(f"the supervisor did not take over within 30 s; see {log}")


def main() -> None:
    """The supervisor: `python -m dpofit.launch.detach STATE`."""
    from dpofit.launch.run import run_plan

    plan = read_plan(Path(sys.argv[1]))
    if plan is None:
        raise SystemExit(f"{sys.argv[1]} holds no plan")
    outcome = run_plan(plan, log=plan.state / LOG_FILE)
    print(f"dpofit: {outcome.title}\n{outcome.advice}".rstrip(), flush=True)
    raise SystemExit(0 if outcome.ok else 1)


if __name__ == "__main__":
    main()
