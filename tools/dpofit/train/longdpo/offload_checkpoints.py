"""Gradient checkpointing whose layer inputs wait for the backward pass in host memory, not on the GPU."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dpofit.errors import BadInput, Problem
from dpofit.train.hooks import Hook
from dpofit.train.longdpo import OWNER
from dpofit.train.longdpo.host_stack import Extent, HostStack
from dpofit.units import GIB

_CHECKPOINTING = "llamafactory.model.model_utils.checkpointing"


def hooks() -> list[Hook]:
    """LLaMA-Factory's unsloth gc is chosen, and what it would use is ours."""
    return [
        Hook(OWNER, f"{_CHECKPOINTING}:_gradient_checkpointing_enable", _always_unsloth),
        # Above the smoke run's stand-in for the stock function (order 0).
        Hook(OWNER, f"{_CHECKPOINTING}:get_unsloth_gradient_checkpointing_func", lambda stock: lambda: offloaded, 10),
        Hook(OWNER, "llamafactory.model.patcher:prepare_model_for_training", _checked),
    ]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Kept:
    """One layer's input: in host memory, and while it is leaving or was fetched ahead, on the device too."""

    shape: torch.Size
    dtype: torch.dtype
    extent: Extent
    on_device: torch.Tensor | None
    ready: Any = None  # event after which `on_device` may be read; None when it may be at once


class LayerInputs:
    """The layer inputs of one device. Copies run on a stream of their own; on a CPU they are plain copies.

    On the device, beside the layer in work: in the forward pass the input that is leaving, in the backward pass the
    one fetched ahead. In host memory: every input from its layer's forward to its layer's backward.
    """

    def __init__(self, device: torch.device, stack: HostStack | None = None) -> None:
        self.device = device
        self.stack = stack or HostStack(_slab_maker(device))
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._copies: Any = None if self._module is None else self._module.Stream(device=device)
        self._leaving: Kept | None = None
        self._left: Any = None  # event: `_leaving` has left
        self._live: list[weakref.ref[Kept]] = []
        self._told = False

    def keep(self, hidden: torch.Tensor) -> Kept:
        """Start copying `hidden` out. Its device memory is free for reuse once the next one has been kept."""
        self._settle()
        self._forget_dead()
        nbytes = hidden.numel() * hidden.element_size()
        kept = Kept(hidden.shape, hidden.dtype, self.stack.take(nbytes), hidden.detach().contiguous())
        weakref.finalize(kept, self.stack.give_back, kept.extent).atexit = False
        self._live.append(weakref.ref(kept))
        source = _bytes(kept.on_device)
        with self._copying():
            for piece, first, last in self.stack.pieces(kept.extent):
                piece.copy_(source[first:last], non_blocking=True)
            self._leaving, self._left = kept, self._event()
        return kept

    def fetch(self, kept: Kept) -> torch.Tensor:
        """`kept` on the device, bit for bit; then start fetching the one kept before it, which backward needs next."""
        self._tell()
        if kept is not self._leaving:
            self._bring(kept)
        if kept.ready is not None:
            self._module.current_stream(self.device).wait_event(kept.ready)
        tensor = kept.on_device
        assert tensor is not None
        self._settle()
        before = self._before(kept)
        if before is not None:
            self._bring(before)
        kept.on_device = kept.ready = None
        return tensor

    def _bring(self, kept: Kept) -> None:
        if kept.on_device is not None:
            return
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        target = _bytes(tensor)
        with self._copying():
            for piece, first, last in self.stack.pieces(kept.extent):
                target[first:last].copy_(piece, non_blocking=True)
            kept.on_device, kept.ready = tensor, self._event()

    def _settle(self) -> None:
        """The input that was leaving has left: only after that may its device memory be reused."""
        if self._leaving is None:
            return
        if self._left is not None:
            self._module.current_stream(self.device).wait_event(self._left)
        self._leaving.on_device = self._leaving = self._left = None

    def _before(self, kept: Kept) -> Kept | None:
        self._forget_dead()
        places = [place for place, live in enumerate(self._live) if live() is kept]
        return self._live[places[0] - 1]() if places and places[0] > 0 else None

    def _forget_dead(self) -> None:
        while self._live and self._live[-1]() is None:
            self._live.pop()

    def _copying(self) -> AbstractContextManager[Any]:
        if self._module is None:
            return nullcontext()
        # Memory just handed out may still be in use by what the computing stream has queued.
        self._copies.wait_stream(self._module.current_stream(self.device))
        return self._module.stream(self._copies)

    def _event(self) -> Any:
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._copies)
        return event

    def _tell(self) -> None:
        if not self._told and os.environ.get("RANK", "0") == "0":
            layers = sum(live() is not None for live in self._live)
            print(
                f"dpofit offload_checkpoints: {layers} layer inputs of this rank wait in "
                f"{self.stack.held_bytes / GIB:.2f} GiB of host memory",
                flush=True,
            )
        self._told = True


@functools.cache
def layer_inputs(device: torch.device) -> LayerInputs:
    """The one store of `device`, for all models of the process."""
    return LayerInputs(device)


def offloaded(function: Callable[..., Any], *args: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)`, with the first floating-point tensor of
    `args` (transformers: the hidden states; everything else comes by keyword) kept in host memory meanwhile."""
    if not torch.is_grad_enabled():
        return function(*args)
    hidden = next((arg for arg in args if torch.is_tensor(arg) and torch.is_floating_point(arg)), None)
    if hidden is None:
        return checkpoint(function, *args, use_reentrant=True)
    inputs = layer_inputs(hidden.device)
    kept = inputs.keep(hidden)
    storage = hidden.untyped_storage()._cdata  # not the tensor itself: autograd holds `pack` as long as what it packed

    def pack(tensor: torch.Tensor) -> Any:
        return kept if tensor.untyped_storage()._cdata == storage else tensor

    def unpack(packed: Any) -> torch.Tensor:
        return inputs.fetch(packed) if isinstance(packed, Kept) else packed

    with saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *args, use_reentrant=True)


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.view(-1).view(torch.uint8)


def _slab_maker(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Makes pinned slabs for an accelerator, pageable ones for a CPU or, with the reason printed, from the first time
    that pinning fails."""
    pinned = device.type != "cpu"

    def make(nbytes: int) -> torch.Tensor:
        nonlocal pinned
        if pinned:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                pinned = False
                print(
                    f"dpofit offload_checkpoints: rank {os.environ.get('RANK', '0')} goes on with pageable memory, "
                    f"whose copies stop the GPU: pinning {nbytes:,} bytes failed: {error}",
                    flush=True,
                )
        return torch.empty(nbytes, dtype=torch.uint8)

    return make


def _always_unsloth(stock: Callable[..., None]) -> Callable[..., None]:
    def enable(model: Any, gradient_checkpointing_kwargs: Any = None, use_unsloth_gc: bool = False) -> None:
        stock(model, gradient_checkpointing_kwargs, use_unsloth_gc=True)

    return enable


def _checked(stock: Callable[..., None]) -> Callable[..., None]:
    def prepare(model: Any, model_args: Any) -> None:
        problems = []
        if model_args.disable_gradient_checkpointing:
            problems.append(
                Problem("recipe", "disable_gradient_checkpointing", "leaves offload_checkpoints nothing to offload",
                        "Remove the key, or switch the piece off.")
            )  # fmt: skip
        if not model_args.use_reentrant_gc:
            problems.append(
                Problem("recipe", "use_reentrant_gc", "offload_checkpoints is exact for reentrant checkpointing only",
                        "Remove the key, or switch the piece off.")
            )  # fmt: skip
        if problems:
            raise BadInput(problems)
        stock(model, model_args)

    return prepare
