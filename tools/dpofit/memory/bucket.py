"""The gradient bucket of ZeRO-3, and when what is in it goes.

Sources: deepspeed 0.18.4 runtime/zero/stage3.py:1327-1418, runtime/comm/coalesced_collectives.py
(reduce_scatter_coalesced).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dpofit.memory.spec import BF16


@dataclass(slots=True)
class Reducer:
    """The gradient bucket of ZeRO-3: small gradients are copied into the buffer, one larger than the bucket keeps its
    own storage until the next gradient flushes it."""

    bucket_elements: int
    world_size: int
    filled: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (module, bytes) still in their own storage
    tensors: list[int] = field(default_factory=list)  # elements of each gradient in the bucket

    def add(self, module: int, elements: int, size_bytes: int) -> list[tuple[int | str, int]]:
        """(module, bytes): that gradient is freed; a copy of the bucket comes and goes."""
        done: list[tuple[int | str, int]] = []
        if self.filled and self.filled + elements > self.bucket_elements:
            done += self.flush()
        if self.filled + elements <= self.bucket_elements:
            done.append((module, size_bytes))
        else:
            self.waiting.append((module, size_bytes))
        self.filled += elements
        self.tensors.append(elements)
        return done

    def state(self, base: int) -> tuple[object, ...]:
        """What decides how the next gradients fare, seen from a layer's base."""
        return self.filled, tuple(self.tensors), tuple((module - base, size) for module, size in self.waiting)

    def shift(self, distance: int) -> None:
        """The same layer again, one further: what waits now belongs to the next layer."""
        self.waiting = [(module + distance, size) for module, size in self.waiting]

    def flush(self) -> list[tuple[int | str, int]]:
        """reduce_scatter_coalesced copies unless one tensor divides evenly; then the gradients go."""
        done: list[tuple[int | str, int]] = []
        if self.tensors and not (len(self.tensors) == 1 and self.tensors[0] % self.world_size == 0):
            done.append(("copy", self.filled * BF16))
        done += self.waiting
        self.waiting, self.tensors, self.filled = [], [], 0
        return done
