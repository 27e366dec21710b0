"""cached_reference's pass over the data before step 1: its own code, on fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from dpofit.trace.request import TraceRequest
from dpofit.trace.storages import Recorder
from dpofit.trace.trainers import batch_of, rows_of_one

BATCHES = 2  # of each rank: ZeRO-3 fetches ahead from the second on
_collect = gc.collect  # the tracer switches the collector off, which frees a given reference here


def run_reference_pass(request: TraceRequest, trainer: Any, recorder: Recorder, load: Callable[[], Any]) -> None:
    """`BATCHES` of the longest rows, scored and thrown away. `load` makes the given `ref_model`: the pass asks for it
    where there is one."""
    from dpofit.train.longdpo import cached_reference, reference_model, reference_pass
    from dpofit.train.longdpo.reference_rows import Example

    size = request.rows // rows_of_one(request)
    count = size * request.world_size * (BATCHES - 1) + 1
    todo = [Example("train", index, (), request.tokens) for index in range(count)]
    run = trainer._dpofit_reference
    run.create_ref_model = load

    def collated(features: list[Any]) -> dict[str, torch.Tensor]:
        recorder.category = "batch"
        batch = batch_of(request)
        recorder.category = ""
        return batch

    def scored(*arguments: Any) -> Any:
        recorder.phase = "reference_forward"
        return score(*arguments)

    score = cached_reference.score
    trainer.data_collator = collated
    trainer.is_deepspeed_enabled = bool(request.deepspeed)
    vars(trainer.args).update(
        process_index=request.rank, world_size=request.world_size, per_device_train_batch_size=size
    )
    with ExitStack() as stack:
        patch = lambda target, name, value: stack.enter_context(mock.patch.object(target, name, value))  # noqa: E731
        patch(cached_reference, "Lines", lambda *_: nullcontext(SimpleNamespace(add=lambda values: None)))
        patch(cached_reference, "_gather", lambda mine: [mine])
        patch(cached_reference, "score", scored)
        patch(reference_pass, "batch_keys", lambda batch, prefix="": [b""] * request.rows)
        patch(reference_model, "gc", SimpleNamespace(collect=_collect))
        cached_reference._compute(trainer, run, {}, {"train": [{}] * count}, todo)
