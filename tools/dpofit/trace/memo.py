"""Answers an operation already seen on tensors of the same kind with new fake tensors, without asking torch again.

FakeTensorMode has a cache too, whose general keys cost more than most operations here; a trace is 85,000 of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_NOT_TWICE_ALIKE = (  # what comes out, or what happens, depends on more than the kinds of the arguments
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_MOVING = ("aten::set_", "aten::resize", "aten::lift", "inductor::")  # change or wrap a tensor in place

Made = tuple[int | None, tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
# (argument whose storage it shares or None, shape, stride, storage offset, dtype, device)

_ANSWERS: dict[tuple[Any, ...], tuple[str, Any]] = {}  # of the process, like FakeTensorMode's own


class Memo:
    """What each (operation, kinds of arguments) gave: an argument itself, views of one, new tensors, plain values."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a fake tensor on each device

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`: its outputs, their aliasing and devices are those of the operation itself."""
        way = _WAYS.get(id(func)) or _way(func)  # an operation hashes slowly, and lives as long as the process
        if way.view is not None and not kwargs and type(args[0]) is FakeTensor and args[0].constant is None:
            made = way.view(*args)
            if made is not None:
                return self._make(made, args)
        if way.excluded:
            return func(*args, **kwargs)
        parts: list[Any] = [id(func)]
        if not (_describe_kinds(parts, args) if way.in_place else _describe(parts, args)):
            return func(*args, **kwargs)
        for name, value in kwargs.items():
            parts.append(name)
            if not _describe(parts, (value,)):
                return func(*args, **kwargs)
        key = tuple(parts)
        answer = _ANSWERS.get(key)
        if answer is None:
            out = func(*args, **kwargs)
            _ANSWERS[key] = ("argument", 0) if way.in_place else _learned(func, args, kwargs, out, parts)
            return out
        kind, learned = answer
        if kind == "unknown":
            return func(*args, **kwargs)
        if kind == "argument":
            return args[learned]
        if kind == "out":
            return kwargs["out"]
        if kind == "plain":
            return learned
        if kind == "one":
            return self._make(learned, args)
        container, several = learned
        return container(None if made is None else self._make(made, args) for made in several)

    def _make(self, made: Made, args: Sequence[Any]) -> FakeTensor:
        shares, shape, stride, offset, dtype, device = made
        with torch._C._DisableTorchDispatch():
            if shares is None:
                elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            elif args[shares].dtype == dtype:
                elem = torch.as_strided(args[shares], shape, stride, offset)
            else:
                elem = torch.empty(0, dtype=dtype, device="meta")
                elem.set_(args[shares].untyped_storage(), offset, shape, stride)
        attributes = self._attributes.get(device)
        if attributes is None:
            out = FakeTensor(self._fake, elem, device)
            self._attributes[device] = dict(out.__dict__)
            return out
        out = torch.Tensor._make_subclass(  # type: ignore[attr-defined]
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        # DeepSpeed asserts on addresses; as FakeTensor itself does for a mode that allows to ask for them
        torch._C._set_warn_deprecated_on_mutable_data_ptr(out)
        out.__dict__.update(attributes)
        return out


def _detached(tensor: FakeTensor) -> Made:
    shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    return 0, shape, stride, offset, tensor.dtype, tensor.fake_device


def _viewed(tensor: FakeTensor, size: Sequence[int]) -> Made | None:
    """`tensor` in another shape; None but for strides as they come."""
    count = tensor.numel()
    if not count or tensor.stride() != _strides(tensor.shape):
        return None
    shape = tuple(size)
    if -1 in shape:
        rest = -math.prod(shape)
        if rest <= 0 or count % rest:
            return None
        shape = tuple(count // rest if length < 0 else length for length in shape)
    if math.prod(shape) != count:
        return None
    return 0, shape, _strides(shape), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _sliced(tensor: FakeTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Made:
    """`tensor[start:end:step]` in `dim`."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    start, end, step = slice(start, end, step).indices(shape[dim])
    offset = int(tensor.storage_offset()) + start * stride[dim]
    shape[dim] = max(0, -(-(end - start) // step))
    stride[dim] *= step
    return 0, tuple(shape), tuple(stride), offset, tensor.dtype, tensor.fake_device


@dataclass(frozen=True, slots=True)
class _Way:
    """How an operation can be answered."""

    excluded: bool  # always by torch
    in_place: bool  # it gives back its first argument, which stays the kind it is
    view: Callable[..., Made | None] | None  # without ever asking


_WAYS: dict[int, _Way] = {}
_VIEWS: dict[Any, Callable[..., Made | None]] = {
    torch.ops.aten.detach.default: _detached,
    torch.ops.aten.slice.Tensor: _sliced,
    torch.ops.aten.view.default: _viewed,
    torch.ops.aten._unsafe_view.default: _viewed,
}


def _way(func: Any) -> _Way:
    excluded = any(tag in func.tags for tag in _NOT_TWICE_ALIKE) or func.name().startswith(_MOVING)
    way = _WAYS[id(func)] = _Way(excluded, not excluded and _in_place(func._schema), _VIEWS.get(func))
    return way


def _in_place(schema: Any) -> bool:
    """Whether the first argument alone is written to, and returned (only an `inplace_view` changes its shape)."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    returned = [value.alias_info is not None and value.alias_info.is_write for value in schema.returns]
    return written[:1] == [True] and not any(written[1:]) and returned == [True]


def _describe_kinds(parts: list[Any], values: Sequence[Any]) -> bool:
    """What decides whether tensors go together at all: an operation in place gives its first whatever their shapes."""
    for value in values:
        if isinstance(value, FakeTensor):
            if value.constant is not None:
                return False
            parts += (value.dtype, value.fake_device)
        elif isinstance(value, _PLAIN):
            parts.append(type(value))
        else:
            return False
    return True


def _describe(parts: list[Any], values: Sequence[Any]) -> bool:
    """Append what tells these arguments from others; False when something among them can't be told."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                return False
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif kind is list or kind is tuple or kind is torch.Size:
            parts += (kind, len(value))
            if not _describe(parts, value):
                return False
        elif isinstance(value, torch.nn.Parameter) and isinstance(value, FakeTensor):
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif isinstance(value, _PLAIN):
            parts += (kind, value)  # 1 and 1.0 hash alike
        else:
            return False
    return True


def _learned(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, parts: list[Any]) -> tuple[str, Any]:
    if func._schema.is_mutable:
        after: list[Any] = [id(func)]
        _describe(after, args)
        for name, value in kwargs.items():
            after.append(name)
            _describe(after, (value,))
        if after != parts:
            return "unknown", None
        if out is not None and out is kwargs.get("out"):
            return "out", None
    if isinstance(out, torch.Tensor):
        for index, value in enumerate(args):
            if value is out:
                return "argument", index
        made = _made(args, out)
        return ("unknown", None) if made is None else ("one", made)
    if out is None or isinstance(out, int | float | bool):
        return "plain", out
    if type(out) in (list, tuple):
        several = [_made(args, item) if isinstance(item, torch.Tensor) else None for item in out]
        if all((made is None) == (item is None) for made, item in zip(several, out, strict=True)):
            return "several", (type(out), several)
    return "unknown", None


def _made(args: Sequence[Any], out: torch.Tensor) -> Made | None:
    if type(out) is not FakeTensor or out.constant is not None or out.requires_grad or out.dtype.is_complex:
        return None
    storage = out.untyped_storage()
    shares = None
    for index, value in enumerate(args):
        for tensor in tree_iter(value):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata == storage._cdata:
                if tensor is not value:
                    return None  # a view of one in a list
                shares = index
    shape, stride, offset = tuple(out.shape), tuple(out.stride()), int(out.storage_offset())
    if shares is None:
        elements = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if offset or (elements if out.numel() else 0) * out.element_size() != storage.nbytes():
            return None  # part of something else
    return shares, shape, stride, offset, out.dtype, out.fake_device
