"""Can a job fit at all? Everything `predict` counts except the allocator's replay: a tenth of its time."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.memory.disk import disk_use
from dpofit.memory.host import HostPeak, host_peak
from dpofit.memory.job import Job, Lengths
from dpofit.memory.meter import highest, phase_peaks
from dpofit.memory.overhead import overhead
from dpofit.memory.predict import GPU, residuals_for
from dpofit.memory.scope import check_scope
from dpofit.memory.step import Plan, build_program, plan_steps


@dataclass(frozen=True, slots=True)
class Screen:
    """`allocated_bytes` of one GPU, and the least that `predict` would give as its high figure: reserved bytes are
    never fewer than allocated ones."""

    allocated_bytes: int
    least_high_bytes: int
    host: HostPeak
    disk_bytes: int
    may_fit: bool  # False: predict's verdict is not `fits`
    plan: Plan  # for the whole prediction


def screen(job: Job, mix: tuple[Lengths, ...]) -> Screen:
    """Screen one job whose other batches are `mix`. Raises BadInput for what is not modelled."""
    check_scope(job.recipe, job.model, job.world_size)
    plan = plan_steps(job)
    program = build_program(job, plan)
    allocated = highest(phase_peaks(program, GPU)).size_bytes
    high = overhead(job).high_bytes + int(allocated * (1 + residuals_for(job.cluster).reserved[1]))
    host, disk = host_peak(job, program, tuple(lengths.row_tokens for lengths in mix)), disk_use(job)
    cluster = job.cluster
    fits = (
        high <= cluster.gpu.capacity_bytes
        and (cluster.host_ram_bytes is None or host.high_bytes <= cluster.host_ram_bytes)
        and (cluster.disk_bytes is None or disk.total_bytes <= cluster.disk_bytes)
    )
    return Screen(allocated, high, host, disk.total_bytes, fits, plan)
