"""What a GPU holds beside torch's allocator: CUDA context, library workspaces and modules, communicators."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.memory.job import Job
from dpofit.units import GIB

# Between reserved and NVML in single-node training on A100 and H100: 1.9 GiB measured twice (fms-acceleration's
# A100 rows against the replay; 126.97 reserved and 128.88 GiB used printed on H100). Of it a bare context is 0.92.
LIBRARIES_BYTES = int((1.9 - 0.92) * GIB)
# The first communicator: 0.5 to 1.6 GB measured, more with more InfiniBand cards; 1.45 GiB after the first barrier of
# two ranks (stas00/ml-engineering 744d01e training/performance/README.md).
COMMUNICATOR_LOW_BYTES, COMMUNICATOR_BYTES, COMMUNICATOR_HIGH_BYTES = int(0.5e9), int(1.0e9), int(1.6e9)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes of one GPU, with the range the measurements span."""

    context_bytes: int
    communicators_bytes: int
    low_bytes: int
    high_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.context_bytes + self.communicators_bytes


def overhead(job: Job) -> Overhead:
    """Context and libraries of the card, and communicators when there is more than one rank; as measured where the
    cluster is calibrated."""
    context = job.cluster.gpu.context_bytes + LIBRARIES_BYTES
    own = job.cluster.calibration
    measured = own.context_for(job.world_size) if own is not None else None
    if own is not None and measured is not None:
        if own.world_size == 1 < job.world_size:  # its run had no communicators
            low, high = measured.low_bytes + COMMUNICATOR_LOW_BYTES, measured.high_bytes + COMMUNICATOR_HIGH_BYTES
            return Overhead(measured.high_bytes, COMMUNICATOR_BYTES, low, high)
        context = measured.high_bytes if job.world_size == 1 else min(context, measured.high_bytes)
        return Overhead(context, measured.high_bytes - context, measured.low_bytes, measured.high_bytes)
    if job.world_size == 1:
        return Overhead(context, 0, job.cluster.gpu.context_bytes, context)
    low = job.cluster.gpu.context_bytes + COMMUNICATOR_LOW_BYTES
    return Overhead(context, COMMUNICATOR_BYTES, low, context + COMMUNICATOR_HIGH_BYTES)
