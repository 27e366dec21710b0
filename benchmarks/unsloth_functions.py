"""unsloth's own functions against their representation in dpofit.trace.unsloth: what each keeps and allocates.

`python benchmarks/unsloth_functions.py [--write]` needs unsloth and unsloth_zoo (requirements-unsloth.txt), no GPU: the
package's own variable for its tests lets it be imported, kernels launch nothing. Every storage that comes and goes in
a forward and a backward is recorded. --write keeps the originals' in benchmarks/results/unsloth-functions.json, against
which tests/trace/test_agreement.py holds the representation where the package is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dpofit.trace.unsloth
from dpofit.trace.kernels import accumulate_in_place
from dpofit.trace.memo import Memo
from dpofit.trace.storages import Recorder, StorageMode

RESULTS = Path(__file__).parent / "results" / "unsloth-functions.json"
ROWS, TOKENS, HIDDEN, INNER, HEADS, RANK = 2, 24, 32, 80, 4, 4
Function = Callable[..., Any]


def weight(out: int, into: int) -> torch.Tensor:
    return torch.zeros(out, into, dtype=torch.bfloat16)


def adapted(out: int, into: int) -> list[Any]:
    """A frozen bf16 weight, its fp32 adapters and their scale."""
    matrices = [torch.zeros(shape, requires_grad=True) for shape in ((RANK, into), (out, RANK))]
    return [weight(out, into), *matrices, 2.0]


def states() -> torch.Tensor:
    """What a layer computes: no leaf, so that functions may write over it."""
    return torch.zeros(ROWS, TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_() * 1


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(ROWS, TOKENS, HEADS, -1).transpose(1, 2)


def cases(functions: Any) -> dict[str, Callable[[], tuple[Function, list[Any]]]]:
    """For each: the function, and arguments made anew. `functions`: ours, or `Originals`."""
    attention = lambda: [one for _ in range(3) for one in adapted(HIDDEN, HIDDEN)]  # noqa: E731
    mlp = lambda: [*adapted(INNER, HIDDEN), *adapted(INNER, HIDDEN), *adapted(HIDDEN, INNER)]  # noqa: E731
    frozen = lambda arguments: [None if index % 4 else one for index, one in enumerate(arguments)]  # noqa: E731
    tables = lambda: [weight(TOKENS, HIDDEN // HEADS) for _ in range(2)]  # noqa: E731
    return {
        "norm": lambda: (functions.RMSNorm.apply, [states(), torch.ones(HIDDEN, dtype=torch.bfloat16)]),
        "rotary positions": lambda: (functions.Rope.apply, [heads(states()), heads(states()), *tables()]),
        "output projection": lambda: (functions.LoraW.apply, [states(), *adapted(HIDDEN, HIDDEN)]),
        "query, key and value": lambda: (functions.LoraQKV.apply, [states(), *attention()]),
        "MLP": lambda: (functions.LoraMLP.apply, [states(), *mlp()]),
        "MLP without adapters": lambda: (functions.LoraMLP.apply, [states().detach(), *frozen(mlp())]),
    }


def measured(make: Callable[[], tuple[Function, list[Any]]]) -> dict[str, int]:
    """Bytes beside the arguments: highest in the forward, kept after it (results included); beside what is held then
    and the results' gradients: highest in the backward, left after it."""
    recorder = Recorder()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False
    row: dict[str, int] = {}
    with fake, torch.autocast("cpu", torch.bfloat16), StorageMode(recorder, {}, int, accumulate_in_place, Memo(fake)):
        function, arguments = make()
        start = len(recorder.marks)
        results = function(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        row["forward_peak_bytes"], row["kept_bytes"] = _highest_and_last(recorder, start)
        if results[0].requires_grad:
            gradients = [torch.zeros_like(one) for one in results]
            start = len(recorder.marks)
            torch.autograd.backward(results, gradients)
            row["backward_peak_bytes"], row["left_bytes"] = _highest_and_last(recorder, start)
    return row


def _highest_and_last(recorder: Recorder, start: int) -> tuple[int, int]:
    alive = [0, *accumulate(mark.size_bytes for mark in recorder.marks[start:])]
    return max(alive), alive[-1]


@contextmanager
def originals() -> Iterator[Any]:
    """unsloth's functions, called as its layers call them, under the names of dpofit.trace.unsloth."""
    os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_LOCATION": tempfile.mkdtemp()}
    import unsloth  # noqa: F401  first, as it asks
    from unsloth.kernels import fast_lora, rms_layernorm, rope_embedding, swiglu

    def lora(function: Any, *rest: Any) -> Any:
        def apply(x: torch.Tensor, *given: Any) -> Any:
            parts = [given[index : index + 4] for index in range(0, len(given), 4)]
            return function.apply(x, *(one for w, a, b, scale in parts for one in (w, None, a, b, scale)), *rest)

        return SimpleNamespace(apply=apply)

    with ExitStack() as stack:
        patch = lambda target, name, value: stack.enter_context(mock.patch.object(target, name, value))  # noqa: E731
        for module in (rms_layernorm, rope_embedding, swiglu):  # a CPU is no device of CUDA's
            patch(module, "torch_gpu_device", lambda device: nullcontext())
        patch(rms_layernorm, "_launch", _nothing)
        patch(rope_embedding, "_rope_launch", _nothing)
        for kernel in ("_fg_kernel", "_DWf_DW_dfg_kernel"):
            patch(swiglu, kernel, _Kernel())
        norm = lambda x, w: rms_layernorm.Fast_RMS_Layernorm.apply(x, w, 1e-6, False, True, True)  # noqa: E731
        yield SimpleNamespace(
            RMSNorm=SimpleNamespace(apply=norm),
            Rope=rope_embedding.Fast_RoPE_Embedding_QK_Positions,
            LoraW=lora(fast_lora.LoRA_W),
            LoraQKV=lora(fast_lora.LoRA_QKV),
            LoraMLP=lora(fast_lora.LoRA_MLP, swiglu.swiglu_fg_kernel, swiglu.swiglu_DWf_DW_dfg_kernel),
        )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A kernel's launch."""


class _Kernel:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return _nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    write = parser.parse_args().write
    with originals() as functions:
        theirs = {name: measured(make) for name, make in cases(functions).items()}
    ours = {name: measured(make) for name, make in cases(dpofit.trace.unsloth).items()}
    for name, row in theirs.items():
        print(f"{name}: {'the same' if ours[name] == row else f'ours {ours[name]}'} {row}")
    if write:
        document = {"unsloth": importlib.metadata.version("unsloth"), "functions": theirs}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(ours != theirs)


if __name__ == "__main__":
    sys.exit(main())
