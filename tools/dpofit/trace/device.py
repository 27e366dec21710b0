"""A stand-in GPU: fake tensors on `cpu:0` are on the card, fake tensors on plain `cpu` are in host memory.

A CPU build of torch can't run backward over fake CUDA tensors (it has no CUDA device guard), but it tells `cpu:0` from
`cpu` everywhere: a copy between them is a copy, mixing them in one operation is an error, as with a real card.
"""

from __future__ import annotations

from typing import Any

import torch

GPU = torch.device("cpu:0")
HOST = torch.device("cpu")


def space_of(device: torch.device, pinned: bool) -> str:
    if device == GPU:
        return "gpu"
    return "host_pinned" if pinned else "host_pageable"


def deepspeed_accelerator(pin: Any) -> Any:
    """A DeepSpeed accelerator whose device is the stand-in; `pin(tensor)` copies into pinned memory."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class StandIn(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return str(GPU)

        def current_device_name(self) -> str:
            return str(GPU)

        def device(self, device_index: int | None = None) -> torch.device:
            return GPU

        def device_count(self) -> int:
            return 1  # the CPU's own asks numactl, a process each time

        def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
            return pin(tensor)

        def is_pinned(self, tensor: torch.Tensor) -> bool:
            return False

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device == GPU

        def memory_allocated(self, device_index: int | None = None) -> int:
            return 0

        max_memory_allocated = memory_cached = max_memory_cached = memory_allocated  # logged, never acted on

    return StandIn()
