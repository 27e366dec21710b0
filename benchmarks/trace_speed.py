"""How long `dpofit predict --trace` takes: the training stack's imports, the trace of few layers, of every layer.

    python benchmarks/trace_speed.py [--json benchmarks/results/trace-speed.json] [--whole] [RECIPE...]

Needs the training stack. Each figure is of a fresh process. `cpu_s` is what it and its fork computed, `wall_s` what a
person waits: on a busy machine only the first says much. `--whole` traces the whole depth too.
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
from io import StringIO
from pathlib import Path

import speed_document

RECIPES = ["qwen2.5-72b-dpo/full-z3", "qwen2.5-72b-dpo/lora-z3", "qwen2.5-7b-dpo/lora-1gpu"]
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


def parts(recipe: str, whole: bool) -> dict[str, object]:
    """Times of one trace inside this process."""
    from dpofit.plan import JobFlags, plan_job
    from dpofit.trace.job import collector_off, program_of, request_of

    request = request_of(plan_job(recipe, [], JobFlags()).job)
    with redirect_stdout(StringIO()), collector_off():
        clock = Clock()
        from dpofit.trace.imports import import_deepspeed, import_training_stack

        os.environ["DS_ACCELERATOR"] = "cpu"
        import_training_stack()
        import_deepspeed()
        from dpofit.trace.extrapolate import trace_deep
        from dpofit.trace.step import trace_step

        imports = clock.read()
        traced = trace_step(request) if whole else trace_deep(request)
        program_of(traced.recorder, request)
        trace = clock.read()
        return {"imports": imports, "trace": trace, "layers": request.layers, "events": len(traced.recorder.marks)}


def _command(recipe: str) -> dict[str, float]:
    clock = Clock()
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "predict", recipe, "--trace", "--json"], capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return clock.read()


def _in_process(recipe: str, whole: bool) -> dict[str, object]:
    command = [sys.executable, __file__, "--parts", recipe, *(["--whole"] if whole else [])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--parts", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts:
        print(json.dumps(parts(options.parts, options.whole)))
        return
    rows = {}
    for recipe in options.recipes:
        rows[recipe] = {"command": _command(recipe), "few_layers": _in_process(recipe, whole=False)}
        if options.whole:
            rows[recipe]["every_layer"] = _in_process(recipe, whole=True)
        print(recipe, json.dumps(rows[recipe]))
    if options.json:
        speed_document.write(options.json, recipes=rows)


if __name__ == "__main__":
    main()
