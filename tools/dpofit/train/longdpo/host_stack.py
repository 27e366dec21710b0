"""Host memory for layer inputs: a stack of bytes laid over equal slabs, which nothing rounds and all steps reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dpofit.train.longdpo import ALIGNMENT_BYTES, SLAB_BYTES


@dataclass(slots=True, eq=False)
class Extent:
    """`nbytes` kept from byte `start` of the stack on; `free` when nobody needs them any more."""

    start: int
    nbytes: int
    free: bool = False


class HostStack:
    """Hands out extents from the top. Layers are kept in forward order and given back in reverse, so it stays dense
    whatever lengths follow each other; what is given back out of turn waits until all above it has gone."""

    def __init__(self, new_slab: Callable[[int], torch.Tensor], slab_bytes: int = SLAB_BYTES) -> None:
        self._new_slab = new_slab
        self._slab_bytes = slab_bytes
        self._slabs: list[torch.Tensor] = []
        self._extents: list[Extent] = []

    @property
    def used_bytes(self) -> int:
        """Up to the top of the stack."""
        return self._extents[-1].start + _aligned(self._extents[-1].nbytes) if self._extents else 0

    @property
    def held_bytes(self) -> int:
        """Of all slabs: the most that was ever in use, rounded up to one slab."""
        return len(self._slabs) * self._slab_bytes

    def take(self, nbytes: int) -> Extent:
        """The next `nbytes`; new slabs are made as they are needed."""
        extent = Extent(self.used_bytes, nbytes)
        while self.held_bytes < extent.start + nbytes:
            self._slabs.append(self._new_slab(self._slab_bytes))
        self._extents.append(extent)
        return extent

    def give_back(self, extent: Extent) -> None:
        """`extent` may be overwritten from now on."""
        extent.free = True
        while self._extents and self._extents[-1].free:
            self._extents.pop()

    def pieces(self, extent: Extent) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The extent's memory in order: (bytes of one slab, first byte within the extent, one past its last)."""
        done = 0
        while done < extent.nbytes:
            slab, offset = divmod(extent.start + done, self._slab_bytes)
            length = min(self._slab_bytes - offset, extent.nbytes - done)
            yield self._slabs[slab][offset : offset + length], done, done + length
            done += length


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
