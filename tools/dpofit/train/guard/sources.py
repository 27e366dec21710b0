"""Which bytes of each parameter this rank holds, and how to read them chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dpofit.train.guard.plan import PlannedTensor


class NotDirect(Exception):
    """The rank does not hold its bytes where the direct and routed backends look; says why."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes `start` to `start + nbytes` of a state-dict entry; they are `data` (flat, uint8, any device)."""

    start: int
    data: torch.Tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The flat uint8 view of a contiguous tensor; shares its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def host_view(flat: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor on the host, not copied."""
    array: Any = flat.numpy()
    return memoryview(array)


def zero3_entries(module: torch.nn.Module, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """Name → parameter or persistent buffer, in the order and with the rules of DeepSpeed's consolidation.

    Models `_zero3_consolidated_16bit_state_dict` (deepspeed 0.18.4 runtime/engine.py:4117): per module its own
    parameters, then its persistent buffers, then its children; tied names appear each.
    """
    entries: dict[str, torch.Tensor] = {}

    def visit(part: torch.nn.Module, prefix: str) -> None:
        for name, parameter in part.named_parameters(recurse=False):
            if not exclude_frozen or parameter.requires_grad:
                entries[prefix + name] = parameter
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                entries[prefix + name] = buffer
        for name, child in part.named_children():
            visit(child, prefix + name + ".")

    visit(module, "")
    return entries


def full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter as the model has it, partitioned or not."""
    shape: Any = getattr(tensor, "ds_shape", None)
    return tuple(tensor.shape if shape is None else shape)


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 manages the tensor."""
    return hasattr(tensor, "ds_tensor")


def span(tensor: torch.Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """`(start, nbytes)` of what `rank` should write: its ZeRO-3 partition, or an even share of a replicated tensor.

    NotDirect when the partition isn't in memory, is quantized, or isn't laid over the whole world in rank order.
    A ZeRO-3 partition is a run of the flattened parameter starting at partition_size x partition_rank, padded
    only at the end (deepspeed 0.18.4 runtime/zero/partition_parameters.py:1718).
    """
    element = tensor.element_size()
    if is_partitioned(tensor):
        parameter: Any = tensor
        partition = parameter.ds_tensor
        if getattr(partition.status, "name", "AVAILABLE") != "AVAILABLE":
            raise NotDirect("partitions are on NVMe")
        if partition.dtype != tensor.dtype:
            raise NotDirect("partitions are quantized")
        share, total = int(partition.ds_numel), int(parameter.ds_numel)
        group = parameter.ds_process_group
        if (
            share * world_size != int(parameter.ds_numel_aligned)
            or torch.distributed.get_world_size(group) != world_size
        ):
            raise NotDirect("partitions don't span all ranks (MiCS, or a subset of the world)")
        if world_size > 1 and torch.distributed.get_rank(group) != torch.distributed.get_rank():
            raise NotDirect("partitions are not in rank order")
    else:
        total = tensor.numel()
        share = -(-total // world_size)
    start = min(share * rank, total)
    return start * element, (min(start + share, total) - start) * element


def held(tensor: torch.Tensor, rank: int, world_size: int) -> Held:
    """The bytes of `span`, from this rank's memory. A partition holds only its own; a replicated tensor any."""
    start, nbytes = span(tensor, rank, world_size)
    if is_partitioned(tensor):
        partition: Any = tensor.ds_tensor  # type: ignore[attr-defined]
        return Held(start, as_bytes(partition.data)[:nbytes])
    return Held(start, as_bytes(tensor.detach().contiguous())[start : start + nbytes])


def overlap(planned: PlannedTensor, start: int, nbytes: int) -> tuple[int, int, int] | None:
    """Where bytes `start`…`start + nbytes` of a source meet `planned`: `(file offset, skip in them, length)`."""
    first = max(planned.source_offset, start)
    last = min(planned.source_offset + planned.nbytes, start + nbytes)
    if first >= last:
        return None
    return planned.offset + first - planned.source_offset, first - start, last - first


class Staging:
    """Turns bytes on any device into host memoryviews of at most `chunk_bytes`, through one reused pinned buffer.

    One, not two in turns: a chunk leaves the GPU many times faster than it is hashed and written.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._pinned: torch.Tensor | None = None

    def chunks(self, data: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a flat uint8 tensor in order. A view is valid until the next one is asked for."""
        for start in range(0, data.numel(), self._chunk_bytes):
            part = data[start : start + self._chunk_bytes]
            if part.device.type != "cpu":
                if self._pinned is None:
                    self._pinned = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True)
                part = self._pinned[: part.numel()].copy_(part)  # blocking: the bytes are there when it returns
            yield host_view(part)
