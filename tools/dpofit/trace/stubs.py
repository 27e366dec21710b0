"""Stand-ins for what a machine without CUDA lacks: Triton's launcher and the flash-attn package."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


class _Kernel:
    """A Triton kernel that launches nothing: what it reads and writes was allocated by its caller."""

    def __init__(self, function: Any):
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def _decorator(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return _Kernel(args[0])
    return lambda function: function if isinstance(function, _Kernel) else _Kernel(function)


class _Constexpr:
    def __init__(self, value: Any = None):
        self.value = value


class _Anything(types.ModuleType):
    """A module any attribute of which exists, for annotations such as `tl.constexpr`."""

    __version__ = "3.7.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@contextmanager
def importable_triton() -> Iterator[None]:
    """Inside, `import triton` works and its kernels launch nothing, so that Liger's own host code runs without a GPU.

    Only inside: torch's inductor asks whether Triton is there, and must go on hearing no.
    """
    import torch._inductor.runtime.hints  # noqa: F401  asks once, before the stand-in is there

    if importlib.util.find_spec("triton") is not None:
        with _launching_nothing():
            yield
        return
    before = set(sys.modules)
    _install_triton()
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "triton":
                del sys.modules[name]


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """The installed Triton, whose kernels need a driver: a launch returns at once."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    with ExitStack() as stack:
        for launcher in (JITFunction, Autotuner, Heuristics):
            stack.enter_context(mock.patch.object(launcher, "run", lambda *args, **kwargs: None))
        yield


def _install_triton() -> None:
    names = [
        "triton", "triton.language", "triton.language.math", "triton.language.extra",
        "triton.language.extra.libdevice", "triton.language.extra.cuda", "triton.language.extra.cuda.libdevice",
        "triton.runtime", "triton.runtime.cache", "triton.tools", "triton.tools.tensor_descriptor",
    ]  # fmt: skip
    for name in names:
        module = _Anything(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    triton: Any = sys.modules["triton"]
    triton.jit = _decorator
    triton.autotune = triton.heuristics = lambda *args, **kwargs: lambda function: function
    triton.Config = lambda *args, **kwargs: None
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << max(0, int(n) - 1).bit_length()
    triton.language.constexpr = _Constexpr
