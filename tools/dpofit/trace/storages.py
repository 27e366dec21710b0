"""Follows every storage of a run on fake tensors from its birth to its death, as CUDA would have allocated it."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from dpofit.trace.device import space_of
from dpofit.trace.memo import Memo

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_TO_COPY = aten._to_copy.default
_ELSEWHERE = {
    aten.nonzero.default, aten.scatter_add.default, aten.bitwise_not.default, aten.index.Tensor, aten.add.Tensor,
}  # fmt: skip
_STAND_INS = str(Path(__file__).with_name("zero.py"))  # for functions of deepspeed, named as they are


@dataclass(slots=True)
class Storage:
    """One storage; `born` and `died` count operations, `died` is None while it lives."""

    index: int
    size_bytes: int
    op: str
    module: str  # the module whose forward made it, "" in backward
    phase: str
    step: int
    born: int
    category: str
    space: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    died: int | None = None
    died_phase: str = ""
    origin: str = ""  # the innermost function of deepspeed that asked for it
    used_by: str = ""  # the operation that ran just before it died


class Mark(NamedTuple):
    """A birth (`size_bytes` > 0) or death (< 0) of storage `index` in a phase of a step."""

    phase: str
    step: int
    index: int  # type: ignore[assignment]  # of the tuple's own methods, this one isn't used
    size_bytes: int
    space: str


@dataclass
class Recorder:
    """What happened, in order."""

    storages: list[Storage] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ops: int = 0
    # Of what ran, by (phase, step); attention as if nothing were masked.
    flops: Counter[tuple[str, int]] = field(default_factory=Counter)
    phase: str = "load"
    step: int = 0
    category: str = ""  # given to every storage born while it's set
    module_path: Callable[[], str] = str  # str() is no module
    last_op: str = ""
    closed: bool = False  # the steps are over; what dies when the model goes is no part of them
    _alive: dict[int, int] = field(default_factory=dict)  # address of a living storage -> its index
    _watched: dict[int, Any] = field(default_factory=dict)  # its index -> the reference that tells of its death

    def see(self, tensor: torch.Tensor, op: str, pinned: bool = False, size_bytes: int | None = None) -> None:
        """Record the storage of `tensor` if it's new; `size_bytes` where its true size isn't the fake's."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes() if size_bytes is None else size_bytes
        if not size:
            return
        index = self._birth(size, op, space_of(tensor.device, pinned), tuple(tensor.shape), str(tensor.dtype)[6:])
        self._alive[key] = index
        self._watched[index] = weakref.ref(storage, partial(self._death, key, index))

    def transient(self, size_bytes: int, op: str) -> None:
        """A kernel's workspace on the card: born and gone within the operation."""
        if size_bytes > 0:
            self._record_death(self._birth(size_bytes, op, "gpu", (), "workspace"))

    def categorize(self, tensor: torch.Tensor, category: str) -> None:
        index = self._alive.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self.storages[index].category = category

    def repin(self, tensor: torch.Tensor) -> None:
        """The storage just born is pinned host memory after all."""
        storage = self.storages[self._alive[tensor.untyped_storage()._cdata]]
        assert self.marks[-1].index == storage.index
        storage.space = "host_pinned"
        self.marks[-1] = self.marks[-1]._replace(space="host_pinned")

    def _birth(self, size: int, op: str, space: str, shape: tuple[int, ...], dtype: str) -> int:
        index = len(self.storages)
        storage = Storage(
            index, size, op, self.module_path(), self.phase, self.step, self.ops, self.category, space, shape, dtype
        )
        storage.origin = _deepspeed_function()
        self.storages.append(storage)
        self.marks.append(Mark(self.phase, self.step, index, size, space))
        return index

    def _death(self, key: int, index: int, _: Any) -> None:
        del self._watched[index]
        if self._alive.get(key) == index:
            del self._alive[key]
        self._record_death(index)

    def _record_death(self, index: int) -> None:
        if self.closed:
            return
        storage = self.storages[index]
        storage.died, storage.died_phase, storage.used_by = self.ops, self.phase, self.last_op
        self.marks.append(Mark(self.phase, self.step, index, -storage.size_bytes, storage.space))

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def peak(self, phase: str | None = None, step: int | None = None, space: str = "gpu") -> tuple[int, int]:
        """(bytes, position in `marks`) of the highest point of a phase of a step; None is any."""
        live = best = 0
        best_at = -1
        for position, mark in enumerate(self.marks):
            if mark.space != space:
                continue
            live += mark.size_bytes
            if live > best and phase in (None, mark.phase) and step in (None, mark.step):
                best, best_at = live, position
        return best, best_at

    def alive_at(self, position: int, space: str = "gpu") -> list[Storage]:
        alive: dict[int, Storage] = {}
        for mark in self.marks[: position + 1]:
            if mark.size_bytes > 0:
                alive[mark.index] = self.storages[mark.index]
            else:
                alive.pop(mark.index, None)
        return [storage for storage in alive.values() if storage.space == space]


def _deepspeed_function() -> str:
    """The innermost deepspeed function within a few calls of here that isn't a wrapper."""
    frame = sys._getframe(3)
    for _ in range(12):
        if frame is None:
            return ""
        path = frame.f_code.co_filename
        if "/deepspeed/runtime/" in path:
            return frame.f_code.co_name
        if path == _STAND_INS:
            return frame.f_code.co_name.removeprefix("_")
        if "/transformers/" in path or "/llamafactory/" in path:
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


Workspace = Callable[[tuple[Any, ...], dict[str, Any]], int]


def _flops(func: Any) -> Callable[..., int] | None:
    """What counts an operation's FLOPs: torch's, asked once for the same shapes, its way to which is a long one. Those
    of torch 2.13.0 take an `out_dtype` (addmm.dtype_out) for another shape."""
    count: Any = flop_registry.get(func._overloadpacket)
    known: dict[tuple[Any, ...], int] = {}

    def counted(*args: Any, **kwargs: Any) -> int:
        told = [one for one in args if not isinstance(one, torch.dtype)]
        shapes = tuple(one.shape if isinstance(one, torch.Tensor) else str(one) for one in told)
        if shapes not in known:
            known[shapes] = count(*told, **kwargs)
        return known[shapes]

    return None if count is None else counted


@dataclass(frozen=True, slots=True)
class _Operation:
    """What is to be known of an operation each time it runs."""

    name: str
    answer: Callable[..., Any] | None  # instead of running it
    shares: bool  # its outputs are its arguments or views of them: nothing is born
    elsewhere: bool  # StorageMode itself knows what some arguments give
    flops: Callable[..., int] | None
    workspace: Workspace | None


class StorageMode(TorchDispatchMode):
    """Sees every operation below autograd, and answers what only real values could (`kernels.py` has the reasons)."""

    def __init__(
        self,
        recorder: Recorder,
        workspace: dict[Any, Workspace],
        scalar: Callable[[torch.Tensor], Any],
        reuse: Callable[[Any, tuple[Any, ...]], torch.Tensor | None],
        memo: Memo,
    ):
        super().__init__()
        self.memo, self.recorder, self.workspace, self.reuse = memo, recorder, workspace, reuse
        self._operations: dict[int, _Operation] = {}  # by id: they hash slowly, and live as long as the process
        self._answers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: scalar,  # .item(): a read on the host, no GPU memory
            # likewise; Liger scales its gradients in place when the answer is no
            aten.equal.default: lambda *tensors: False,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and guarding every operation against it costs as much as the operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        recorder = self.recorder
        operation = self._operations.get(id(func)) or self._learn(func)
        if operation.answer is not None:
            return operation.answer(*args, **kwargs)
        recorder.ops += 1
        recorder.last_op = operation.name
        out = self._elsewhere(func, args, kwargs) if operation.elsewhere else NotImplemented
        if out is NotImplemented:
            out = self.memo.call(func, args, kwargs)
        if operation.flops is not None:
            recorder.flops[recorder.phase, recorder.step] += operation.flops(*args, **kwargs, out_val=out)
        if operation.shares and type(args[0]) is FakeTensor:
            return out
        # ATen TensorConversions.cpp: a non-blocking copy to the CPU lands in pinned memory
        pinned = func is _TO_COPY and bool(kwargs.get("non_blocking"))
        if type(out) is FakeTensor:
            recorder.see(out, operation.name, pinned)
        elif out is not None:
            for tensor in tree_iter(out):
                if isinstance(tensor, torch.Tensor):
                    recorder.see(tensor, operation.name, pinned)
        if operation.workspace is not None:  # beside the output, which is allocated first
            recorder.transient(operation.workspace(args, kwargs), operation.name)
        return out

    def _learn(self, func: Any) -> _Operation:
        name = func.name().removeprefix("aten::")
        answer = func if name.startswith("prim::") else self._answers.get(func)  # a question about the tensor, not work
        shares = bool(func._schema.returns) and all(value.alias_info is not None for value in func._schema.returns)
        operation = _Operation(
            name, answer, shares and not name.startswith(("set_", "resize", "lift")), func in _ELSEWHERE,
            _flops(func), self.workspace.get(func),
        )  # fmt: skip
        self._operations[id(func)] = operation
        return operation

    def _elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What some operations give for some arguments; NotImplemented where torch is to say."""
        if func is aten.nonzero.default:  # the most there can be: every position counts
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func is aten.scatter_add.default:
            # gather's backward is in place for plain tensors, out of place for tensor subclasses
            # (torch 2.13 FunctionsManual.cpp gather_backward, areAnyTensorSubclassLike)
            return aten.scatter_add_.default(*args, **kwargs)
        if func is aten.bitwise_not.default:
            out = self.memo.call(func, args, kwargs)
            out.is_rest = True
            return out
        if func is aten.index.Tensor:
            rows = _tagged_rows(args[1])
            return NotImplemented if rows is None else func(args[0], [args[0].new_empty(rows, dtype=torch.int64)])
        reused = self.reuse(func, args)
        return NotImplemented if reused is None else reused


def _tagged_rows(indices: Any) -> int | None:
    """How many rows a mask of rows takes, KTO's tags: half are chosen, `~tags` are the rest."""
    first = indices[0] if indices else None
    if first is None or first.dtype != torch.bool or first.ndim != 1:
        return None
    return first.numel() // 2 if getattr(first, "is_rest", False) else -(-first.numel() // 2)
