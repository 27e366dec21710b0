"""Imports the training stack without what only plots and compilers need: those load when first called."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from dpofit.trace.request import TraceRequest

_PLOTS = ("matplotlib", "matplotlib.figure", "matplotlib.pyplot")  # llamafactory/extras/ploting.py
_DETECTORS = ("scipy.optimize",)  # transformers/loss: an assignment in the losses of object detectors
_JUDGES = ("huggingface_hub.inference._client",)  # trl/trainer/judges.py: a client of remote judges
_COMPILERS = (  # deepspeed/compile
    "deepspeed.compile.inductor", "functorch.compile", "torch._functorch.aot_autograd", "torch._functorch.partitioners",
)  # fmt: skip


def import_training_stack(request: TraceRequest | None = None) -> None:
    """LLaMA-Factory first: importing it mends what trl 0.24 misreads of transformers 5; then what `request` needs."""
    with _later(*_PLOTS, *_DETECTORS, *_JUDGES):
        import llamafactory.train.tuner  # noqa: F401

        if request is not None:
            importlib.import_module(f"llamafactory.train.{request.stage}.trainer")
            if request.finetuning == "lora" or "offload_optimizer" in request.deepspeed.get("zero_optimization", {}):
                _import_bitsandbytes()
            if not request.deepspeed and (request.finetuning == "lora" or "cached_reference" in request.long_context):
                import_deepspeed()  # accelerate does, to see whether the policy that is to score is an engine
    logging.getLogger("llamafactory").setLevel(logging.WARNING)


def _import_bitsandbytes() -> None:
    """PEFT does with the first adapter, accelerate to offload an optimizer, where it is installed. Here, not amid a
    trace, which would see its tables; and it compiles functions where it defines them."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        with mock.patch.object(torch, "compile", _compiled_later):
            import bitsandbytes  # noqa: F401


def import_deepspeed() -> None:
    """DeepSpeed compiles a function of its Muon where it defines it, and its own compiler imports torch's."""
    with mock.patch.object(torch, "compile", _compiled_later), _later(*_COMPILERS):
        import deepspeed  # noqa: F401


class _Later(ModuleType):
    """A module of functions that is imported when one of them is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)


@contextmanager
def _later(*names: str) -> Iterator[None]:
    """Inside, an import of these modules, where nobody has imported them, gives one that comes later."""
    stood_in = {name: _Later(name) for name in names if name not in sys.modules}
    sys.modules.update(stood_in)
    try:
        yield
    finally:
        for name in stood_in:
            del sys.modules[name]


def _compiled_later(function: Any = None, **options: Any) -> Any:
    """torch.compile at the first call."""
    if function is None:
        return partial(_compiled_later, **options)
    compiled: list[Any] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(function, **options))
        return compiled[0](*args, **kwargs)

    return call
