"""Follows every storage of a run on fake tensors from its birth to its death, as CUDA would have allocated it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten


@dataclass(slots=True)
class Storage:
    """One storage: `born` and `died` count operations; `died` is None while it lives."""

    index: int
    size_bytes: int
    op: str
    module: str
    phase: str
    born: int
    category: str
    space: str = "gpu"
    died: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    died_phase: str = ""
    used_by: str = ""  # the operation that ran just before it died


@dataclass
class Recorder:
    """What happened, in order: +index is a birth, -index-1 a death."""

    storages: list[Storage] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)  # (phase, +index / ~index)
    ops: int = 0
    op_counts: Counter[str] = field(default_factory=Counter)
    phase: str = "init"
    space: str = "gpu"
    category: str = "activation"
    module_path: Callable[[], str] = lambda: ""
    last_op: str = ""

    def __post_init__(self) -> None:
        # Finalizers keep storages identified by the id of their wrapper, which lives as long as the storage does.
        self._alive: dict[int, int] = {}

    def see(self, tensor: torch.Tensor, op: str, size_bytes: int | None = None) -> None:
        """Record the storage of `tensor` if it's new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        index = self._birth(
            storage.nbytes() if size_bytes is None else size_bytes, op, tuple(tensor.shape), str(tensor.dtype)[6:]
        )
        self._alive[key] = index
        weakref.finalize(storage, self._death, key, index).atexit = False

    def transient(self, size_bytes: int, op: str) -> None:
        """A kernel's workspace: born and gone within the operation."""
        if size_bytes > 0:
            index = self._birth(size_bytes, op, (), "workspace")
            self._record_death(index)

    def set_category(self, tensor: torch.Tensor, category: str, space: str = "gpu") -> None:
        index = self._alive.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self.storages[index].category = category
            self.storages[index].space = space

    def _birth(self, size_bytes: int, op: str, shape: tuple[int, ...], dtype: str) -> int:
        index = len(self.storages)
        self.storages.append(
            Storage(index, size_bytes, op, self.module_path(), self.phase, self.ops, self.category, self.space,
                    shape=shape, dtype=dtype)
        )  # fmt: skip
        self.events.append((self.phase, index))
        return index

    def _death(self, key: int, index: int) -> None:
        if self._alive.get(key) == index:
            del self._alive[key]
        self._record_death(index)

    def _record_death(self, index: int) -> None:
        storage = self.storages[index]
        storage.died, storage.died_phase, storage.used_by = self.ops, self.phase, self.last_op
        self.events.append((self.phase, ~index))

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def peak(self, phase: str | None = None, space: str = "gpu") -> tuple[int, int]:
        """(bytes, event index) of the highest point of `phase`, or of the whole run."""
        live = best = 0
        best_at = -1
        for position, (event_phase, code) in enumerate(self.events):
            storage = self.storages[code if code >= 0 else ~code]
            if storage.space != space:
                continue
            live += storage.size_bytes if code >= 0 else -storage.size_bytes
            if (phase is None or event_phase == phase) and live > best:
                best, best_at = live, position
        return best, best_at

    def alive_at(self, position: int, space: str = "gpu") -> list[Storage]:
        alive: dict[int, Storage] = {}
        for _, code in self.events[: position + 1]:
            if code >= 0:
                alive[code] = self.storages[code]
            else:
                alive.pop(~code, None)
        return [storage for storage in alive.values() if storage.space == space]


Workspace = Callable[[tuple[Any, ...], dict[str, Any]], int]


class StorageMode(TorchDispatchMode):
    """Sees every operation under autograd; corrects the known differences of a dispatch-level trace (see kernels.py)."""

    def __init__(self, recorder: Recorder, workspace: dict[Any, Workspace], scalar: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.recorder, self.workspace, self.scalar = recorder, workspace, scalar
        self.reuse: Callable[[Any, tuple[Any, ...]], torch.Tensor | None] = lambda func, args: None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        recorder = self.recorder
        name = func.name().removeprefix("aten::")
        if func is aten._local_scalar_dense.default:  # .item(): a read on the host, no GPU memory
            return self.scalar(args[0])
        if func is aten.equal.default:  # likewise; Liger scales its gradients in place when the answer is no
            return False
        if func is aten.nonzero.default:  # the most there can be: every position counts
            out = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
            recorder.see(out, name)
            return out
        if func is aten.scatter_add.default:
            # gather's backward is in place for plain tensors, out of place for tensor subclasses
            # (torch 2.13 FunctionsManual.cpp gather_backward, areAnyTensorSubclassLike)
            return aten.scatter_add_.default(*args, **kwargs)
        if name.startswith("prim::"):  # a question about the tensor, not work
            return func(*args, **kwargs)
        recorder.ops += 1
        recorder.last_op = name
        reused = self.reuse(func, args)
        if reused is not None:
            return reused
        out = func(*args, **kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                recorder.see(tensor, name)
        size = self.workspace.get(func)
        if size is not None:  # beside the output, which is allocated first
            recorder.transient(size(args, kwargs), name)
        return out
