"""The real long-context pieces inside a trace: their hooks installed, and the little that needs real values told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from dpofit.trace import kernels
from dpofit.trace.device import HOST
from dpofit.trace.request import TraceRequest


@contextmanager
def pieces(request: TraceRequest, pin: Callable[[torch.Tensor], None]) -> Iterator[list[str]]:
    """Inside, `request.long_context` is installed as in a real run; yields what stands in for what. `pin`: call it for
    a tensor in host memory that is pinned."""
    from dpofit.train import hooks, longdpo

    done: list[str] = []
    with ExitStack() as stack:
        patch = lambda target, name, value: stack.enter_context(mock.patch.object(target, name, value))  # noqa: E731
        from dpofit.train.longdpo import wide

        patch(wide, "product", _product_on_cuda)
        if "answer_logps" in request.long_context:
            from dpofit.train.longdpo import answer_logps

            patch(answer_logps, "answer_positions", lambda labels: _answer_positions(labels, request.answers))
            done.append(f"answer_logps: {request.answers:,} positions predict a label, from the job's lengths")
        if request.shared is not None:
            from dpofit.train.longdpo import shared_attention, shared_prompt
            from dpofit.train.longdpo.shared_row import SharedRow

            row = SharedRow(*request.shared, padded=request.tokens)
            patch(shared_prompt, "shared_row", lambda ids, mask: row)
            # What torch says of bf16 heads on a CUDA card.
            patch(shared_attention, "_lower_right_mask", lambda *_: (kernels.LOWER_RIGHT, True))
            done.append("shared_prompt: the row's layout is the job's lengths; its second attention is torch's flash")
        if "cached_reference" in request.long_context:
            from dpofit.train.longdpo import cached_reference

            patch(cached_reference, "_look_up", _looked_up)
            done.append("cached_reference: the pass before step 1 has two batches, what it finds is on no disk")
        if "offload_checkpoints" in request.long_context:
            from dpofit.train.longdpo import offload_checkpoints

            patch(offload_checkpoints, "_slab_maker", lambda device: lambda nbytes: _pinned_slab(nbytes, pin))
            offload_checkpoints.layer_inputs.cache_clear()
            stack.callback(offload_checkpoints.layer_inputs.cache_clear)
            done.append("offload_checkpoints: copies on one stream, slabs counted as pinned")
        longdpo.install(request.long_context)
        stack.callback(hooks.uninstall, longdpo.OWNER)
        yield done


def tile(model: torch.nn.Module, request: TraceRequest) -> None:
    """tiled_mlp on a model that LLaMA-Factory's loader has not seen."""
    if "tiled_mlp" not in request.long_context:
        return
    from dpofit.train.longdpo.tiled_mlp import tile as really_tile

    stage = request.deepspeed.get("zero_optimization", {}).get("stage", 0)
    with mock.patch("transformers.integrations.is_deepspeed_zero3_enabled", lambda: stage == 3):
        really_tile(model)


def cache_for(request: TraceRequest, finetuning_args: Any) -> Any:
    """What the trainer carries once its cache is full; None without the piece."""
    if "cached_reference" not in request.long_context:
        return None
    from dpofit.train.longdpo.cached_reference import _Run

    return _Run(None, None, None, finetuning_args, values={b"": 0.0})


def _answer_positions(labels: torch.Tensor, answers: int) -> tuple[torch.Tensor, torch.Tensor]:
    return labels.new_zeros(answers), labels.new_zeros(answers)


def _product_on_cuda(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def _looked_up(run: Any, batch: dict[str, torch.Tensor], prefix: str = "") -> torch.Tensor:
    ids = batch[f"{prefix}input_ids"]
    return ids.new_zeros(len(ids), dtype=torch.float32)


def _pinned_slab(nbytes: int, pin: Callable[[torch.Tensor], None]) -> torch.Tensor:
    slab = torch.empty(nbytes, dtype=torch.uint8, device=HOST)
    pin(slab)
    return slab
