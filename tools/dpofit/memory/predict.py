"""From a Job to its prediction: peaks of GPU, host and disk, an interval around each, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from dpofit.hardware.cluster import Cluster
from dpofit.memory.disk import DiskUse, disk_use
from dpofit.memory.host import HostPeak, host_peak
from dpofit.memory.job import Job, Lengths
from dpofit.memory.meter import Peak, highest, phase_peaks
from dpofit.memory.overhead import Overhead, overhead
from dpofit.memory.program import PHASES, Program
from dpofit.memory.reserve import Reserved, reserved
from dpofit.memory.scope import check_scope
from dpofit.memory.step import Plan, build_program, plan_steps, steady_step

Verdict = Literal["fits", "tight", "oom"]
GPU = frozenset({"gpu"})
# Without a length distribution: shares of the longest row that other batches have, stated in the output. Chosen on the
# calibration half of the public cases (benchmarks/README.md): where segments grow, more batches change nothing.
EXPANDABLE_MIX, SEGMENTS_MIX = (0.5, 0.75), (0.4, 0.6, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors of predictions against measurements, (lowest, highest) of the calibration half of the public
    cases: measured = predicted x (1 + residual). Written by benchmarks/score.py, never by hand."""

    allocated: tuple[float, float]
    reserved: tuple[float, float]
    points: int


@cache
def residuals() -> Residuals:
    """The committed residuals."""
    raw = json.loads(Path(__file__).with_name("residuals.json").read_text(encoding="utf-8"))
    return Residuals(tuple(raw["allocated"]), tuple(raw["reserved"]), raw["points"])


def residuals_for(cluster: Cluster) -> Residuals:
    """The committed residuals, widened by the errors of a run on this very cluster where it was calibrated. One run
    never narrows them: it shows what happened once, not how far the next may lie off."""
    public, own = residuals(), cluster.calibration
    if own is None:
        return public
    return Residuals(
        _with(public.allocated, own.allocated_error), _with(public.reserved, own.reserved_error), public.points + 1
    )


def _with(found: tuple[float, float], error: float | None) -> tuple[float, float]:
    return found if error is None else (min(found[0], error), max(found[1], error))


@dataclass(frozen=True, slots=True)
class GpuPrediction:
    """Bytes of one GPU. `peak_bytes` is what NVML would show: context, communicators, reserved."""

    capacity_bytes: int
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    allocated_bytes: int
    reserved: Reserved
    overhead: Overhead
    expandable: bool
    peak: Peak  # the phase with the highest allocated bytes, and what they are
    phases: Mapping[str, Peak]  # allocated, of the steady step where there is one
    first_step: Mapping[str, Peak]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Everything `dpofit predict` says of one job."""

    job: Job
    verdict: Verdict
    gpu_verdict: Verdict
    host_verdict: Verdict | None  # None: host RAM unknown
    disk_verdict: Verdict | None
    gpu: GpuPrediction
    host: HostPeak
    disk: DiskUse
    mix: tuple[Lengths, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """Allocated bytes at the peak of each phase of the traced steady step, and what stood in for CUDA-only code."""

    phases: Mapping[str, int]
    substitutions: tuple[str, ...]


def expandable_segments(job: Job) -> bool:
    """The recipe's environment decides, else what LLaMA-Factory's launcher does (on since 0.9.3, launcher.py)."""
    if job.recipe.expandable_segments is not None:
        return job.recipe.expandable_segments
    return job.stack.at_least("llamafactory", "0.9.3")


def default_mix(job: Job) -> tuple[Lengths, ...]:
    """Shorter batches of a run whose length distribution is not known."""
    lengths = job.lengths
    return tuple(
        Lengths(int(lengths.prompt * share), int(lengths.chosen * share), int(lengths.rejected * share), lengths.padded)
        for share in (EXPANDABLE_MIX if expandable_segments(job) else SEGMENTS_MIX)
    )


class _Run(NamedTuple):
    """A job's program, the shorter batches before it, and what all of it would reserve with nothing bounding it."""

    job: Job
    mix: tuple[Lengths, ...]
    program: Program
    shorter: list[Program]
    unbounded: Reserved


def predict(job: Job, mix: tuple[Lengths, ...] | None = None, plan: Plan | None = None) -> Prediction:
    """Predict one job. `mix`: lengths of other batches of the run; `plan`: of the same job at another length.

    Raises BadInput for what is not modelled.
    """
    return _predicted(_run(job, mix, plan))


def fitting_prediction(job: Job, mix: tuple[Lengths, ...] | None = None, plan: Plan | None = None) -> Prediction | None:
    """What `predict` says where that is `fits`, else None, which one replay tells. Raises as it does."""
    run = _run(job, mix, plan)
    if high_bytes(job, run.unbounded) > job.cluster.gpu.capacity_bytes:
        return None
    found = _predicted(run)
    return found if found.verdict == "fits" else None


def _run(job: Job, mix: tuple[Lengths, ...] | None, plan: Plan | None) -> _Run:
    check_scope(job.recipe, job.model, job.world_size)
    mix = default_mix(job) if mix is None else mix
    plan = plan or plan_steps(job)
    program, shorter = build_program(job, plan), shorter_steps(job, plan, mix)
    return _Run(job, mix, program, shorter, wanted(job, program, shorter))


def _predicted(run: _Run) -> Prediction:
    job = run.job
    gpu = _gpu(run)
    host, disk = host_peak(job, run.program, row_tokens(run.mix)), disk_use(job)
    gpu_verdict = _verdict(gpu.low_bytes, gpu.high_bytes, gpu.capacity_bytes)
    host_verdict, disk_verdict = verdicts_beside(job, host, disk)
    verdict = _worst(gpu_verdict, host_verdict, disk_verdict)
    return Prediction(job, verdict, gpu_verdict, host_verdict, disk_verdict, gpu, host, disk, run.mix)


def verdicts_beside(job: Job, host: HostPeak, disk: DiskUse) -> tuple[Verdict | None, Verdict | None]:
    """Of host and disk; None where the cluster's is not known."""
    ram_bytes, disk_bytes = job.cluster.host_ram_bytes, job.cluster.disk_bytes
    return (
        None if ram_bytes is None else _verdict(host.low_bytes, host.high_bytes, ram_bytes),
        None if disk_bytes is None else _verdict(disk.total_bytes, disk.total_bytes, disk_bytes),
    )


def row_tokens(mix: tuple[Lengths, ...]) -> tuple[int, ...]:
    return tuple(lengths.row_tokens for lengths in mix)


def shorter_steps(job: Job, plan: Plan, mix: tuple[Lengths, ...]) -> list[Program]:
    """The shorter batches as `reserved` takes them: a whole program, then steady steps."""
    shorter = [replace(job, lengths=lengths) for lengths in mix]
    return [steady_step(other, plan) if number else build_program(other, plan) for number, other in enumerate(shorter)]


def wanted(job: Job, program: Program, mix: list[Program], capacity_bytes: int | None = None) -> Reserved:
    """What the allocator would reserve, by default with nothing bounding it."""
    emptied = set[str]()
    if job.recipe.torch_empty_cache_steps == 1:  # between loss and backward: transformers trainer.py:1910
        emptied.add("backward")
    if job.recipe.badam is not None:  # after every step: badam 1.4 block_optim.py:223
        emptied.add("forward")
    return reserved(
        program, mix, expandable=expandable_segments(job), capacity_bytes=capacity_bytes,
        emptied_before=frozenset(emptied),
    )  # fmt: skip


def high_bytes(job: Job, unbounded: Reserved) -> int:
    """The most that a card must have for the job to fit for sure: room for all that the allocator would reserve. What
    a full card really reserves says less: a failing cudaMalloc gives cached memory back first."""
    return overhead(job).high_bytes + int(unbounded.peak_bytes * (1 + residuals_for(job.cluster).reserved[1]))


def _gpu(run: _Run) -> GpuPrediction:
    job, program, unbounded = run.job, run.program, run.unbounded
    peaks = phase_peaks(program, GPU)
    peak = highest(peaks)
    beside = overhead(job)
    capacity = job.cluster.gpu.capacity_bytes
    room = max(capacity - beside.total_bytes, 1)
    held = unbounded
    if unbounded.peak_bytes > room:  # only then does a bound change anything
        held = wanted(job, program, run.shorter, room)
    if held.out_of_memory:  # what it would have wanted, from the longest rows alone
        alone = wanted(job, program, [])
        held = replace(held, peak_bytes=max(held.peak_bytes, alone.peak_bytes), phases=alone.phases)
    used = beside.total_bytes + held.peak_bytes
    low = min(beside.low_bytes + int(peak.size_bytes * (1 + residuals_for(job.cluster).allocated[0])), used)
    high = max(high_bytes(job, unbounded), used)
    phases = {name: p for name in PHASES for p in peaks if p.phase == name and p.step != 1}
    first = {p.phase: p for p in peaks if p.step == 1}
    expandable = expandable_segments(job)
    return GpuPrediction(capacity, used, low, high, peak.size_bytes, held, beside, expandable, peak, phases, first)


def reserved_without_expandable(prediction: Prediction) -> int:
    """What the allocator would reserve with expandable_segments:False at the longest rows, nothing bounding it."""
    job = prediction.job
    return reserved(build_program(job, plan_steps(job)), [], expandable=False, capacity_bytes=None).peak_bytes


def _verdict(low_bytes: int, high_bytes: int, capacity_bytes: int) -> Verdict:
    if high_bytes <= capacity_bytes:
        return "fits"
    return "oom" if low_bytes > capacity_bytes else "tight"


def _worst(*verdicts: Verdict | None) -> Verdict:
    order: tuple[Verdict, ...] = ("oom", "tight", "fits")
    return next(verdict for verdict in order if verdict in verdicts)
