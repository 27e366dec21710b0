"""A run beside its prediction: how far off it was, and the constants of its cluster that follow."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.hardware.calibration import Calibration, Context
from dpofit.memory.measured import RunRead
from dpofit.memory.predict import Prediction


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


def _most(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def calibration(run: RunRead, name: str, prediction: Prediction) -> Calibration:
    """The constants that `run`, called `name`, shows of the cluster it was predicted for."""
    allocated, reserved = compared(run, prediction)[:2]
    beside = [rank.beside_bytes for rank in run.ranks if rank.beside_bytes is not None]
    cluster = prediction.job.cluster
    context = Context(max(min(beside), 0), max(beside)) if beside and max(beside) > 0 else None
    return Calibration(name, cluster.gpu.name, cluster.world_size, context, allocated.error, reserved.error)
