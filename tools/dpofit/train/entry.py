"""One training process: reads the recipe, installs the hooks, and hands over to LLaMA-Factory's `run_exp`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput
from dpofit.recipe.load import ReadRecipe, read_recipe
from dpofit.recipe.long_context import written
from dpofit.train.failures import Failed, note_failures


def main(argv: Sequence[str] | None = None) -> None:
    """Train `RECIPE key=value …` in this process; bad input is printed by rank 0 and exits 2.

    Under torchrun an exception also reaches the agent as structured text (torch's `record`), so that whoever
    started the job can be told which rank failed first and why.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "DPOFIT_STATE" in os.environ:
        die_with_parent()
    from torch.distributed.elastic.multiprocessing.errors import record

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        record(_train)(arguments)
    except BadInput as bad:
        if os.environ.get("RANK", "0") == "0":
            for problem in bad.problems:
                print(f"error: {problem}", file=sys.stderr)
        _note_failure(2, f"BadInput: {bad}")
        raise SystemExit(2) from None
    except Exception as error:
        _note_failure(1, f"{type(error).__name__}: {error}")
        raise


def _note_failure(code: int, message: str) -> None:
    """Without torchrun nobody else would tell the launcher what this process died of."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and (state := os.environ.get("DPOFIT_STATE")):
        note_failures(Path(state), [Failed(0, 0, os.getpid(), code, int(time.time()), message)])


def _read(reference: str, overrides: Sequence[str]) -> ReadRecipe:
    read = read_recipe(reference, overrides)
    if read.recipe is None:
        raise BadInput([issue.problem() for issue in read.issues if issue.stops])
    return read


def _arguments(read: ReadRecipe) -> dict[str, Any]:
    """The settings LLaMA-Factory gets: the recipe after overrides, its DeepSpeed config inline.

    Inline because a relative path, or the name of one of LLaMA-Factory's examples, means nothing to DeepSpeed.
    """
    assert read.recipe is not None
    arguments = dict(read.recipe.settings)
    if read.deepspeed is not None:
        arguments["deepspeed"] = dict(read.deepspeed.config)
    return arguments


def die_with_parent() -> None:
    """Have the kernel send SIGTERM here when our parent dies: torchrun's workers lead sessions of their own, so
    nothing else would reach them if it is killed outright (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)


def _train(arguments: Sequence[str]) -> None:
    if not arguments:
        raise SystemExit("usage: python -m dpofit.train RECIPE [key=value …]")
    read = _read(arguments[0], arguments[1:])
    settings = _arguments(read)
    # First of all: it mends transformers' package lookup, which trl asks while it is imported (packages.py 132-152).
    import llamafactory.extras.packages  # noqa: F401

    from dpofit.train import guard, longdpo
    from dpofit.train.memory_log import MemoryLog, memory_hooks
    from dpofit.train.phases import Phases, phase_hooks
    from dpofit.train.ranks import check_ranks

    phases = Phases.from_environment()
    phases.enter("start")
    check_ranks()
    if os.environ.get("DPOFIT_CPU") == "1":
        from dpofit.train.cpu import prepare as prepare_cpu

        prepare_cpu("deepspeed" in settings)
    smoke = os.environ.get("DPOFIT_SMOKE")
    if smoke:
        from dpofit.train.smoke import prepare

        prepare(Path(smoke))
    guard.install()
    longdpo.install(read.run.long_context)
    if read.run.long_context and os.environ.get("RANK", "0") == "0":
        print(f"dpofit: long-context pieces on: {written(read.run.long_context)}", flush=True)
    from dpofit.train import hooks

    hooks.install(phase_hooks(phases))
    memory_log = MemoryLog()
    hooks.install(memory_hooks(memory_log))
    from llamafactory.train.tuner import run_exp

    run_exp(settings, callbacks=_callbacks(phases, memory_log, smoke))
    phases.enter("end")
    if smoke:
        from dpofit.train.smoke import finish

        finish(settings, Path(smoke))


def _callbacks(phases: Any, memory_log: Any, smoke: str | None) -> list[Any]:
    from dpofit.train.phases import PhaseCallback
    from dpofit.train.stop import StopOnFlag

    callbacks: list[Any] = [PhaseCallback(phases), memory_log, StopOnFlag()]
    if smoke:
        from dpofit.train.smoke import SmokeCallback

        callbacks.append(SmokeCallback(Path(smoke)))
    return callbacks
