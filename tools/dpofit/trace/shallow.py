"""The two shallow traces of a deep model, and what of ZeRO-3's optimizer depends on the whole depth."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from dpofit.trace.imports import import_training_stack
from dpofit.trace.request import TraceRequest
from dpofit.trace.step import TracedStep, trace_step
from dpofit.trace.storages import Recorder
from dpofit.trace.zero import process_group


def shallow_layers(request: TraceRequest) -> int | None:
    """Layers enough for a steady state between the ends; None where depth changes more than a period.

    ZeRO-1 and 2 give a rank the first part of all parameters: which layers touch it is no matter of the period.
    ZeRO-3 counts elements until it lets go of a parameter. Freeze tuning trains the ends.
    """
    zero = request.deepspeed.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage in (1, 2):
        return None
    few = 3 + (abs(request.freeze_layers) if request.finetuning == "freeze" else 0)
    if stage < 3:
        return few
    attention = 2 * request.hidden_size * request.head_dim * (request.heads + request.kv_heads)
    layer = attention + 3 * request.hidden_size * request.intermediate_size
    names = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    kept = -(-max(int(zero.get(name, 1e9)) for name in names) // layer)
    return few + kept * min(request.micro_batches, 2)  # a micro-batch begins with what the one before has kept


@dataclass(frozen=True, slots=True)
class Groups:
    """ZeRO-3's optimizer: elements of this rank's part of each parameter of each group, and of its reduce bucket."""

    parts: tuple[tuple[int, ...], ...] = ()
    bucket_part: float = math.inf


@dataclass(frozen=True, slots=True)
class Shallow:
    """A trace of few layers, and its optimizer's groups."""

    traced: TracedStep
    groups: Groups


def trace_shallow(request: TraceRequest, layers: int) -> tuple[Shallow, Shallow]:
    """`layers` and one more, side by side where a second core can take one."""
    if not _may_fork():
        return _trace(request, layers), _trace(request, layers + 1)
    import_training_stack(request)
    if request.deepspeed:
        with process_group(request.rank, request.world_size, Recorder()):
            pass  # imports DeepSpeed, once for both
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        low = pool.submit(_trace_elsewhere, request, layers)
        high = _trace(request, layers + 1)
        return low.result(), high


def _may_fork() -> bool:
    """Once a process: the engine of a CUDA build refuses to run in the fork of a process where it has run."""
    several = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
    return several and threading.active_count() == 1 and not _TRACED


_TRACED: list[int] = []  # layers that this process has traced itself


def _trace_elsewhere(request: TraceRequest, layers: int) -> Shallow:
    """What crosses to another process: a recorder of plain values."""
    shallow = _trace(request, layers)
    recorder = shallow.traced.recorder
    return replace(shallow, traced=replace(shallow.traced, recorder=Recorder(recorder.storages, recorder.marks)))


def _trace(request: TraceRequest, layers: int) -> Shallow:
    """Trace with one ZeRO-3 sub_group a parameter group."""
    _TRACED.append(layers)
    deepspeed = request.deepspeed
    if deepspeed:
        deepspeed = deepspeed | {"zero_optimization": deepspeed["zero_optimization"] | {"sub_group_size": 10**18}}
    found: list[Groups] = []

    def observe(trainer: Any) -> None:
        optimizer = getattr(trainer.model, "optimizer", None)
        groups = [group for group in getattr(optimizer, "fp16_groups", ()) if hasattr(group[0], "partition_numel")]
        if groups:
            parts = tuple(tuple(param.partition_numel() for param in group) for group in groups)
            found.append(Groups(parts, optimizer.reduce_bucket_size / request.world_size))  # type: ignore[union-attr]

    traced = trace_step(replace(request, layers=layers, deepspeed=deepspeed), observe)
    return Shallow(traced, found[0] if found else Groups())


def bucket_fills_deeper(low: Groups, high: Groups, further: int) -> bool:
    """Whether gradients wait for each other in a bucket that the traced depth never fills, and the whole depth does."""
    limit = high.bucket_part
    short, long = (sum(part for group in groups.parts for part in group if part <= limit) for groups in (low, high))
    return long <= limit < long + (long - short) * further


def split_sub_groups(recorder: Recorder, request: TraceRequest, low: Groups, high: Groups, further: int) -> None:
    """Give what the optimizer's step makes for a sub_group the size of the largest, where a group has several."""
    limit = int(request.deepspeed.get("zero_optimization", {}).get("sub_group_size", 1e9))
    for short, long in zip(low.parts, high.parts, strict=True):
        whole = sum(long) + (sum(long) - sum(short)) * further
        largest = max(_packed(_inserted(short, long, further), limit))
        if largest == whole:
            continue
        shrunk: dict[int, int] = {}
        for storage in recorder.storages:
            made_in_step = storage.phase in ("init", "optimizer_step") and storage.died is not None
            if made_in_step and storage.shape == (whole,):
                shrunk[storage.index] = storage.size_bytes = storage.size_bytes // whole * largest
                storage.shape = (largest,)
        for position, mark in enumerate(recorder.marks):
            if mark.index in shrunk:
                size_bytes = shrunk[mark.index] if mark.size_bytes > 0 else -shrunk[mark.index]
                recorder.marks[position] = mark._replace(size_bytes=size_bytes)


def _inserted(low: Sequence[int], high: Sequence[int], further: int) -> list[int]:
    """`high` with what it has more than `low`, a layer's parameters, `further` times more."""
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    layer = list(high[same : same + len(high) - len(low)])
    return [*high[:same], *layer * (1 + further), *high[same + len(layer) :]]


def _packed(parts: Sequence[int], limit: int) -> list[int]:
    """Elements of each sub_group: deepspeed 0.18.4 stage3.py:1027 _create_fp16_sub_groups."""
    sizes = [0]
    for part in parts:
        if sizes[-1] >= limit:
            sizes.append(0)
        sizes[-1] += part
    return sizes
