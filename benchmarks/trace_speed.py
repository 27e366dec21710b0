"""How long `dpofit predict --trace` takes, and where it goes: with DeepSpeed's real engine, and without DeepSpeed.

    python benchmarks/trace_speed.py [--json benchmarks/results/trace-speed.json] [--whole] [RECIPE...]

Needs the training stack. Each figure is of a fresh process: the whole `command`; the training stack's imports and the
trace of `few_layers` (two traces side by side, and what they prove about the whole depth); the deeper of the two alone,
`split` in building the models, making the trainer (and DeepSpeed's engines), and each step. `cpu_s` is what the process
and its fork computed, `wall_s` what a person waits: on a busy machine only the first says much. `--whole` traces the
whole depth too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import speed_document

from dpofit.plan import JobFlags, plan_job
from dpofit.trace.job import collector_off, program_of, request_of
from dpofit.trace.request import TraceRequest

RECIPES = ["qwen2.5-72b-dpo/full-z3", "qwen2.5-72b-dpo/qlora-ddp", "qwen2.5-7b-dpo/lora-1gpu"]
MAIN = "from dpofit.cli.app import main; main()"


class Clock:
    """CPU and wall seconds since it was last read."""

    def __init__(self) -> None:
        self.cpu_s, self.wall_s = _cpu_s(), time.perf_counter()

    def read(self) -> dict[str, float]:
        cpu_s, wall_s = _cpu_s(), time.perf_counter()
        passed = {"cpu_s": round(cpu_s - self.cpu_s, 1), "wall_s": round(wall_s - self.wall_s, 1)}
        self.cpu_s, self.wall_s = cpu_s, wall_s
        return passed


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def few_layers(request: TraceRequest) -> dict[str, object]:
    """The trace that `predict --trace` makes, as a program."""
    from dpofit.trace.extrapolate import trace_deep

    clock = Clock()
    traced = trace_deep(request)
    program_of(traced.recorder, request)
    return {"trace": clock.read(), "events": len(traced.recorder.marks), "how": traced.substitutions[-1]}


def every_layer(request: TraceRequest) -> dict[str, object]:
    """The trace of the whole depth, as a program."""
    from dpofit.trace.step import trace_step

    clock = Clock()
    traced = trace_step(request)
    program_of(traced.recorder, request)
    return {"trace": clock.read(), "events": len(traced.recorder.marks)}


def split(request: TraceRequest) -> dict[str, object]:
    """The deeper of the two shallow traces alone, or that of the whole depth where there are none."""
    from dpofit.trace import step
    from dpofit.trace.shallow import shallow_layers

    few = shallow_layers(request)
    layers = request.layers if few is None else min(few + 1, request.layers)
    make_trainer, clock, found = step.make_trainer, Clock(), {}

    def made(*args: Any) -> Any:
        found["build"] = clock.read()
        trainer = make_trainer(*args)
        found["trainer"] = clock.read()
        return trainer

    with mock.patch.object(step, "make_trainer", made):
        traced = step.trace_step(
            replace(request, layers=layers), stepped=lambda: found.update({f"step_{len(found) - 1}": clock.read()})
        )
    return {"layers": layers, "operations": traced.recorder.ops, **found}


PARTS = {part.__name__: part for part in (few_layers, every_layer, split)}


def run_part(recipe: str, part: str) -> dict[str, object]:
    """The part of one trace inside this process, and the imports before it."""
    request = request_of(plan_job(recipe, [], JobFlags()).job)
    with redirect_stdout(StringIO()), collector_off():
        clock = Clock()
        from dpofit.trace.imports import import_deepspeed, import_training_stack

        os.environ["DS_ACCELERATOR"] = "cpu"
        import_training_stack(request)
        if request.deepspeed:  # else it has come where it is needed
            import_deepspeed()
        imports = clock.read()
        return {"imports": imports, **PARTS[part](request)}


def _command(recipe: str) -> dict[str, float]:
    clock = Clock()
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "predict", recipe, "--trace", "--json"], capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return clock.read()


def _in_process(recipe: str, part: str) -> dict[str, object]:
    command = [sys.executable, __file__, "--part", part, recipe]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(run_part(options.recipes[0], options.part)))
        return
    rows: dict[str, dict[str, object]] = {}
    for recipe in options.recipes:
        rows[recipe] = {"command": _command(recipe)}
        for part in PARTS:
            if options.whole or part != "every_layer":
                rows[recipe][part] = _in_process(recipe, part)
        print(recipe, json.dumps(rows[recipe], indent=2))
    if options.json:
        speed_document.write(options.json, recipes=rows)


if __name__ == "__main__":
    main()
