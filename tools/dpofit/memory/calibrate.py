"""A run beside its prediction: how far off it was, and the constants of its cluster that follow."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.findings import Evidence, Finding
from dpofit.hardware.calibration import Calibration, Context
from dpofit.memory.measured import RunRead
from dpofit.memory.predict import Prediction

FAR_OFF = 0.2  # beyond every row of docs/accuracy.md with known code


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure: predicted, and measured (of the rank or node with the most); None: `why` it was not."""

    what: str
    predicted_bytes: int
    measured_bytes: int | None
    why: str = ""

    @property
    def error(self) -> float | None:
        """Measured over predicted, less one."""
        return None if self.measured_bytes is None else self.measured_bytes / self.predicted_bytes - 1


def compared(run: RunRead, prediction: Prediction) -> tuple[Compared, ...]:
    """Allocated, reserved, NVML, what lies between those two, and a node's host memory."""
    gpu, host = prediction.gpu, prediction.host
    allocated = _most([rank.allocated_bytes for rank in run.ranks])
    reserved = _most([rank.reserved_bytes for rank in run.ranks])
    if run.record_vram is not None:
        # Rank 0's peaks from the start; ours are of whole steps, of every rank.
        allocated, reserved = allocated or run.record_vram[0], reserved or run.record_vram[1]
    no_cuda = "no reading from a GPU in the log" if run.ranks else "not in the log"
    no_nvml = "NVML was not read" if allocated is not None else no_cuda
    beside = _most([rank.beside_bytes for rank in run.ranks])
    no_host = "" if run.ranks else "RECORD_VRAM says nothing of the host"
    by_node: dict[int, int] = {}
    for rank in run.ranks:
        by_node[rank.node_rank] = by_node.get(rank.node_rank, 0) + rank.rss_bytes
    return (
        Compared("allocated", gpu.allocated_bytes, allocated, no_cuda),
        Compared("reserved", gpu.reserved.peak_bytes, reserved, no_cuda),
        Compared("NVML", gpu.peak_bytes, _most([rank.nvml_bytes for rank in run.ranks]), no_nvml),
        Compared("context, communicators", gpu.overhead.total_bytes, beside, no_nvml),
        Compared("host, a node's processes", host.peak_bytes, max(by_node.values(), default=None), no_host),
    )  # fmt: skip


def far_off(own: Calibration, lengths_given: bool) -> list[Finding]:
    """A warning when a stored correction is so large that another job must have run than was predicted."""
    errors = {"allocated": own.allocated_error, "reserved": own.reserved_error}
    far = {name: error for name, error in errors.items() if error is not None and abs(error) > FAR_OFF}
    if not far:
        return []
    evidence = tuple(Evidence(name, f"{error:+.1%} of what was predicted") for name, error in far.items())
    cause = "Runs whose recipe, lengths and versions are those predicted lie far closer (docs/accuracy.md)."
    fix = "Name what ran with --recipe, --stack and KEY=VALUE; later predictions are off by as much with this file."
    if not lengths_given:
        fix = (
            f"Give the run's real lengths (--lengths, or --prompt and --response): rows were taken as cutoff_len. {fix}"
        )
    return [
        Finding("memory.calibration-far-off", "warning", "the run is far from its prediction", evidence, cause, fix)
    ]


def _most(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def calibration(run: RunRead, name: str, prediction: Prediction) -> Calibration:
    """The constants that `run`, called `name`, shows of the cluster it was predicted for."""
    allocated, reserved = compared(run, prediction)[:2]
    beside = [rank.beside_bytes for rank in run.ranks if rank.beside_bytes is not None]
    cluster = prediction.job.cluster
    context = Context(max(min(beside), 0), max(beside)) if beside and max(beside) > 0 else None
    return Calibration(name, cluster.gpu.name, cluster.world_size, context, allocated.error, reserved.error)
