"""Traces the step of Qwen2.5-72B, all 80 layers, stock and with each long-context piece: real trainer, real DeepSpeed
engine, fake tensors, rank 0 of 32. `python benchmarks/long_context_traced.py` does what is not yet in
benchmarks/results/long-context-traced.json, a point a process; docs/long-context.md shows the figures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from dpofit.plan import JobFlags, plan_job
from dpofit.recipe.long_context import PIECES

RESULTS = Path(__file__).parent / "results" / "long-context-traced.json"
RECIPE = "qwen2.5-72b-dpo/full-z3-liger"


def points() -> list[tuple[str, int]]:
    return [(pieces, prompt) for prompt in (8192, 32_768, 65_536) for pieces in ("off", *PIECES, "all")]


def trace(pieces: str, prompt: int) -> dict[str, object]:
    """The steady step's phases, and the most host memory that is pinned."""
    from dpofit.memory.meter import phase_peaks
    from dpofit.trace.job import trace_job

    flags = JobFlags("a800-80g", 4, 8, "1000GiB", prompt=prompt, response=1024, long_context=pieces)
    job = plan_job(RECIPE, ["rope_scaling=yarn", "gradient_accumulation_steps=1"], flags).job
    start = time.perf_counter()
    program = trace_job(job)
    seconds = time.perf_counter() - start
    phases: dict[str, int] = {}
    for peak in phase_peaks(program, frozenset({"gpu"})):
        if peak.step == 2:
            phases[peak.phase] = max(peak.size_bytes, phases.get(peak.phase, 0))
    pinned = max((peak.size_bytes for peak in phase_peaks(program, frozenset({"host_pinned"}))), default=0)
    return {
        "peak_bytes": max(phases.values()), "phases": phases, "pinned_bytes": pinned, "layers": job.model.layers,
        "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) == 3:  # one point, for a process of its own: an engine leaves much behind
        print(json.dumps(trace(sys.argv[1], int(sys.argv[2]))), file=sys.__stderr__)
        return
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for pieces, prompt in points():
        name = f"{pieces}:{prompt}"
        if name in found:
            continue
        command = [sys.executable, __file__, pieces, str(prompt)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stderr.strip().splitlines()[-1])
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(name, f"{found[name]['peak_bytes'] / 2**30:.2f} GiB", f"{found[name]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
