"""Updates inside backward: what layer-wise GaLore and APOLLO do where the gradient buckets of ZeRO would stand.

Source: llamafactory 0.9.5 train/trainer_utils.py:243-267: a hook on each parameter steps an optimizer of its own, and
lets go of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpofit.memory.zero3 import ModuleIds


@dataclass(frozen=True, slots=True)
class StepInBackward:
    """Takes a Reducer's place (memory/overlay.py). `temporaries`: bytes that updating each module's weight needs."""

    temporaries: Mapping[str, int]
    ids: ModuleIds

    def add(self, module: int, elements: int, size_bytes: int) -> list[tuple[int | str, int]]:
        """An update's temporaries come and go, then the gradient goes."""
        return [("update", self.temporaries[self.ids.name(module)]), (module, size_bytes)]

    def state(self, base: int) -> tuple[object, ...]:
        return ()

    def shift(self, distance: int) -> None:
        pass

    def flush(self) -> list[tuple[int | str, int]]:
        return []
