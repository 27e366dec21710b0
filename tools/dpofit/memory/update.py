"""From backward's gradients to the updated weights: buckets, what stays until the step, the step's temporaries."""

from __future__ import annotations

import math

from dpofit.memory.job import Job
from dpofit.memory.optimizers import copies_of_all
from dpofit.memory.own_optimizers import held_for, layerwise, owned, update_for
from dpofit.memory.part import Part
from dpofit.memory.partition import CHECK, FLOAT64, partition_bytes
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.memory.program import Event, Repeat
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.states import State, flat_weights
from dpofit.memory.tape import Mark
from dpofit.memory.tensors import Tensor, largest_tensor, trained_tensors
from dpofit.memory.zero import ZeroSizes

Items = list[Event | Repeat]


def allocate(states: list[State]) -> list[Event]:
    events: list[Event] = []
    for state in states:
        if state.space == "host_pinned" and state.size_bytes:
            block = pinned_block_bytes(math.ceil(state.size_bytes / state.blocks))
            events += [Event(f"{state.tag}.{n}", block, state.category, state.space) for n in range(state.blocks)]
        elif state.size_bytes and state.space == "gpu" and state.blocks > 1:
            block, rest = divmod(state.size_bytes, state.blocks)
            sizes = [block + (number < rest) for number in range(state.blocks)]
            events += [Event(f"{state.tag}.{number}", size, state.category) for number, size in enumerate(sizes)]
        elif state.size_bytes:
            events.append(Event(state.tag, state.size_bytes, state.category, state.space))
    return events


def comes_and_goes(tag: str, size_bytes: int, category: str, space: str = "gpu") -> Items:
    """Something that comes and goes."""
    if size_bytes <= 0:
        return []
    event = Event(tag, size_bytes, category, space)  # type: ignore[arg-type]
    return [event, event._replace(size_bytes=-size_bytes)]


def end(event: Event) -> Event:
    return event._replace(size_bytes=-event.size_bytes)


def forwarded_twice(job: Job) -> bool:
    """The policy's ZeRO-3 engine has more forwards a step than the one that backward follows: KTO's KL estimate, or a
    LoRA run's reference, which is the policy with its adapters off."""
    return job.zero_stage == 3 and (job.passes > 1 or job.adapters_switched_off)


def optimizer_update(job: Job, sizes: ZeroSizes | None, appearing: list[State]) -> Items:
    """Temporaries of the step: fp32 gradients of a group, then what the optimizer itself needs."""
    items: Items = list(allocate(appearing))
    zero = job.recipe.zero
    if layerwise(job.recipe):
        return items
    if zero is None:
        items += _optimizer_temporaries(job, trained_tensors(job), job.updated_bytes)
        narrowed = largest_tensor(job) * BF16 if job.recipe.badam is not None else 0  # _update_param
        return items + comes_and_goes("narrowed", narrowed, "optimizer_workspace")
    if zero.offload_optimizer == "cpu":
        return items
    assert sizes is not None
    if zero.stage == 0:
        return items + _unfused_update(job)
    if job.recipe.fp16 and zero.stage < 3:
        items += comes_and_goes("overflow", partition_bytes(job, CHECK).looked_at, "optimizer_workspace")
    # get_grad_norm_direct takes each gradient, here its partition, to float64 (stage3.py)
    norm = (
        math.ceil(largest_tensor(job) / job.world_size) * FLOAT64 if zero.stage == 3 else partition_bytes(job).looked_at
    )
    items += comes_and_goes("grad_norm", norm, "optimizer_workspace")
    group = flat_weights(job, sizes)[0]
    flat = Event("flat_grads", group.elements * BF16, "optimizer_workspace")
    wide = Event("fp32_grads", group.elements * FP32, "optimizer_workspace")
    items += [flat, wide, end(flat)]
    items += _optimizer_temporaries(job, [group._replace(times=1)], FP32)
    return [*items, end(wide)]


def _unfused_update(job: Job) -> Items:
    """deepspeed 0.18.4 fp16/unfused_optimizer.py step: each gradient to fp32 to look for overflow, then all at once."""
    tensors = trained_tensors(job)
    wide = allocate([State("fp32_grads", job.trained_parameters * FP32, "optimizer_workspace",
                           blocks=sum(tensor.times for tensor in tensors))])  # fmt: skip
    check = comes_and_goes("overflow", largest_tensor(job) * FP32, "optimizer_workspace")
    return [*check, *wide, *_optimizer_temporaries(job, tensors, FP32), *map(end, wide)]


def first_unfused_step(job: Job) -> Items:
    """initialize_optimizer_states: a step on gradients of zero, in bf16 and fp32."""
    zeros = Event("first_gradients", job.trained_parameters * (BF16 + FP32), "gradients")
    return [zeros, *_optimizer_temporaries(job, trained_tensors(job), FP32), end(zeros)]


def _optimizer_temporaries(job: Job, tensors: list[Tensor], element_bytes: int) -> Items:
    """Copies of all tensors at once, then the most that one tensor's update needs."""
    count = sum(tensor.times for tensor in tensors)
    one_copy = sum(tensor.elements * tensor.times for tensor in tensors) * element_bytes
    size_bytes = 0 if owned(job.recipe) else copies_of_all(job.recipe) * one_copy
    copies = allocate([State("foreach", size_bytes, "optimizer_workspace", blocks=count)])
    needed = (
        update_for(job.recipe, tensor, element_bytes).temporary + held_for(job.recipe, tensors, tensor)
        for tensor in tensors
    )
    largest = max(needed, default=0)
    return [*copies, *map(end, copies), *comes_and_goes("update", largest, "optimizer_workspace")]


def zero_grad(parts: list[Part]) -> Items:
    """Gradients that stayed until the step go: zero_grad(set_to_none=True)."""
    items: Items = []
    for part in parts:
        events = tuple(
            Event(f"grad.{record.module}", -record.size_bytes, "gradients")
            for record in part.records
            if isinstance(record, Mark) and record.kind == "grad"
        )
        if events:
            items += [Repeat(events, part.layers, part.first)] if part.layers else list(events)
    return items
