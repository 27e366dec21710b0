"""The machine a job runs on: GPU capacity with its source, nodes, host RAM and disk."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.hardware.calibration import Calibration

AMPERE = 8, 0


def has_bf16(compute_capability: tuple[int, int] | None) -> bool:
    """torch 2.13 torch/cuda/__init__.py is_bf16_supported(including_emulation=False)."""
    return compute_capability is None or compute_capability >= AMPERE


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of card. `capacity_bytes` is what torch reports as total memory, not the number on the box."""

    name: str
    capacity_bytes: int
    source: str
    context_bytes: int  # CUDA context + kernels of a training process, before any tensor
    bf16_tflops: float | None = None  # dense peak; None when unknown (an exact --gpu SIZE)
    pcie_gb_per_s: float | None = None
    compute_capability: tuple[int, int] | None = None  # None when unknown

    @property
    def bf16(self) -> bool:
        """Has it bf16 units, and FlashAttention-2? Cards before Ampere have neither; an unknown one counts as newer."""
        return has_bf16(self.compute_capability)


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` equal nodes of `gpus_per_node` cards; host RAM and disk are per node and may be unknown, and so is what
    a run of one's own showed."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    host_ram_bytes: int | None = None
    disk_bytes: int | None = None
    calibration: Calibration | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node
