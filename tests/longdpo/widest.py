"""Watches every tensor that operators make: which are as wide as the vocabulary, which are square masks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Born(TorchDispatchMode):
    """Collects the shapes of all results, views and copies, by operator; `of` filters what is kept."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self._of = of
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self._of(leaf):
                self.shapes.add(tuple(leaf.shape))
        return result
