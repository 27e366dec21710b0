"""Traces the step of Qwen2.5-72B, all 80 layers, stock and with each long-context piece: real trainer, real DeepSpeed
engine, fake tensors, rank 0 of 32. `python benchmarks/long_context_traced.py` does what is not yet in
benchmarks/results/long-context-traced.json, a point a process; docs/long-context.md shows the figures.

FLOPs are torch.utils.flop_counter's of one pair: of its step (forward, the reference where it has one, recompute,
backward), and of the pass that fills the reference's cache. Attention is counted as if nothing were masked. Traced with
one and two layers, the other 78 added, without DeepSpeed, which multiplies nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from dpofit.memory.job import Job
from dpofit.plan import JobFlags, plan_job
from dpofit.recipe.long_context import PIECES

RESULTS = Path(__file__).parent / "results" / "long-context-traced.json"
COUNTED = ("off", "shared_prompt", "all")  # whose FLOPs the page tells
RECIPE = "qwen2.5-72b-dpo/full-z3-liger"


def points() -> list[tuple[str, int]]:
    return [(pieces, prompt) for prompt in (8192, 32_768, 65_536) for pieces in ("off", *PIECES, "all")]


def job_of(pieces: str, prompt: int) -> Job:
    flags = JobFlags("a800-80g", 4, 8, "1000GiB", prompt=prompt, response=1024, long_context=pieces)
    return plan_job(RECIPE, ["rope_scaling=yarn", "gradient_accumulation_steps=1"], flags).job


def trace(pieces: str, prompt: int) -> dict[str, object]:
    """The steady step's phases, the pass before it, and the most host memory that is pinned."""
    from dpofit.memory.meter import phase_peaks
    from dpofit.report.traced import compared_peaks
    from dpofit.trace.job import trace_job

    job = job_of(pieces, prompt)
    start = time.perf_counter()
    program = trace_job(job)
    seconds = time.perf_counter() - start
    phases = compared_peaks(program)
    pinned = max((peak.size_bytes for peak in phase_peaks(program, frozenset({"host_pinned"}))), default=0)
    return {
        "peak_bytes": max(phases.values()), "phases": phases, "pinned_bytes": pinned, "layers": job.model.layers,
        "seconds": round(seconds, 1),
    }  # fmt: skip


def count(pieces: str, prompt: int) -> dict[str, int]:
    """FLOPs of a pair: of the step, of the pass before step 1."""
    from dpofit.trace.job import collector_off, request_of
    from dpofit.trace.reference_pass import BATCHES
    from dpofit.trace.step import trace_step

    request = request_of(job_of(pieces, prompt))
    alone = replace(request, deepspeed={}, precision="pure_bf16", world_size=1, steps=1, optimizer="")
    found: list[tuple[int, int]] = []
    for layers in (1, 2):
        with collector_off():
            flops = trace_step(replace(alone, layers=layers)).recorder.flops
        of_step, of_pass = (sum(n for (_, step), n in flops.items() if step == which) for which in (1, 0))
        found.append((of_step, of_pass))
    step, before = (one + (request.layers - 1) * (two - one) for one, two in zip(*found, strict=True))
    return {"step": step, "reference_pass": before // BATCHES}


def main() -> None:
    if len(sys.argv) == 3:  # one point, for a process of its own: an engine leaves much behind
        print(json.dumps(trace(sys.argv[1], int(sys.argv[2]))), file=sys.__stderr__)
        return
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for pieces, prompt in points():
        name = f"{pieces}:{prompt}"
        if name not in found:
            command = [sys.executable, __file__, pieces, str(prompt)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stderr.strip().splitlines()[-1])
            print(name, f"{found[name]['peak_bytes'] / 2**30:.2f} GiB", f"{found[name]['seconds']} s", flush=True)
        if pieces in COUNTED and "flops" not in found[name]:
            found[name]["flops"] = count(pieces, prompt)
            print(name, f"{found[name]['flops']['step'] / 1e15:.2f} PFLOP a pair", flush=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
