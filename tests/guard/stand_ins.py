"""What a CPU lacks for DeepSpeed's rarer engines, in plain torch and os: the kernel is replaced, never the engine."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch


def coalesced_gathers_for_gloo() -> None:
    """MiCS gathers several partitions as one NCCL call (0.18.4 comm/torch.py:255); gloo takes them one by one."""
    from deepspeed.comm.torch import TorchBackend

    def all_gather_coalesced(
        backend: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        for output, mine in zip(outputs, inputs, strict=True):
            torch.distributed.all_gather_into_tensor(output, mine, group=group)
        return SimpleNamespace(wait=lambda: None)

    TorchBackend.all_gather_coalesced = all_gather_coalesced


class _FileHandle:
    """The calls that DeepSpeed's swappers make of the async_io operator's handle, done at once."""

    def __init__(self, **settings: int) -> None:
        self._done = 0

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        data = memoryview(buffer.view(torch.uint8).numpy())
        with open(path, "rb") as file:
            assert os.preadv(file.fileno(), [data], offset) == data.nbytes
        self._done += 1
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        with open(path, "wb") as file:
            os.pwrite(file.fileno(), buffer.view(torch.uint8).numpy(), offset)
        self._done += 1
        return 0

    def wait(self) -> int:
        done, self._done = self._done, 0
        return done


def nvme_without_libaio() -> None:
    """The async_io operator needs libaio, and page-locked memory; the files, and who swaps when, are the same."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper

    class Builder:
        def load(self, verbose: bool = True) -> Any:
            return SimpleNamespace(aio_handle=_FileHandle)

    partitioned_param_swapper.AsyncIOBuilder = Builder
    get_accelerator().is_pinned = lambda tensor: True


def fp16_without_its_instructions() -> None:
    """DeepSpeed refuses fp16 where the CPU has no instructions for it; torch computes it anyway, slower."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
