"""What stays for the whole run: weights, masters, optimizer states, gradient buffers, reference; per rank.

Sources: deepspeed 0.18.4 runtime/zero/stage3.py:590-628 (buffers), 905-1026 (fp32 partitions), stage_1_and_2.py:
414-449;
llamafactory 0.9.5 model/adapter.py:316-346; bitsandbytes nn/modules.py (4-bit), optim/optimizer.py (8-bit).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dpofit.memory.job import Job
from dpofit.memory.optimizers import offloaded_states
from dpofit.memory.own_optimizers import update_for
from dpofit.memory.program import Space
from dpofit.memory.quantized import stored_bytes
from dpofit.memory.spec import BF16, FP32, Quantization
from dpofit.memory.tensors import Tensor, frozen_tensors, largest_tensor, parameters_of, trained_tensors
from dpofit.memory.zero import ZeroSizes
from dpofit.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class State:
    """A buffer that lives from `phase` on; `until_init` marks one that goes when init ends."""

    tag: str
    size_bytes: int
    category: str
    space: Space = "gpu"
    blocks: int = 1  # allocations it is made of: pinned ones are rounded each, GPU ones reuse what is free


def quantized_layer_bytes(model: ModelShape, kind: Quantization | None) -> int:
    """Bytes of one decoder layer's frozen weights on the GPU, in few bits when quantized."""
    if kind is None:
        return model.layer_parameters * BF16
    weights = sum(linear.in_features * linear.out_features for linear in model.linears)
    stored = sum(stored_bytes(kind, linear) for linear in model.linears)
    return stored + (model.layer_parameters - weights) * BF16


def base_weight_bytes(job: Job) -> int:
    """Bytes of the whole frozen or bf16 policy."""
    return frozen_bytes(job.model, job.quantization)


def frozen_bytes(model: ModelShape, kind: Quantization | None) -> int:
    """Bytes of a whole model in bf16, its layers' linears in few bits when quantized."""
    embeddings = model.embedding_parameters * (1 if model.tied_embeddings else 2) + model.hidden_size
    return model.layers * quantized_layer_bytes(model, kind) + embeddings * BF16


def moments(job: Job, tensors: Iterable[Tensor], element_bytes: int) -> list[State]:
    """What the optimizer keeps from its first step on: on the GPU, and in managed memory that can leave it."""
    sizes: list[int] = []
    managed = 0
    for tensor in tensors:
        update = update_for(job.recipe, tensor, element_bytes)
        sizes += update.kept * tensor.times
        managed += update.managed * tensor.times
    return [
        State("moments", sum(sizes), "optimizer", blocks=max(len(sizes), 1)),
        State("moments_paged", managed, "optimizer", "host_pageable"),
    ]


def flat_weights(job: Job, sizes: ZeroSizes) -> list[Tensor]:
    """The trained weights as DeepSpeed hands them to the optimizer: this rank's share, at stage 3 cut in sub-groups."""
    share = math.ceil(job.trained_parameters / job.world_size)
    group = min(share, sizes.sub_group) if job.zero_stage == 3 else share
    whole, rest = divmod(share, max(group, 1))
    found = [Tensor("flat", (group,), whole)]
    return [*found, Tensor("flat", (rest,), 1)] if rest else found


def weight_states(job: Job) -> list[State]:
    """Weights of policy and reference, at load."""
    world, model, zero = job.world_size, job.model, job.recipe.zero
    adapters = job.adapter_parameters + job.copied_parameters
    own = job.own_trained_parameters - job.copied_parameters
    if zero is None:
        states = [State("weights", base_weight_bytes(job) + own * (job.trained_bytes - BF16), "weights")]
        if job.reference_copy:
            states.append(State("reference", frozen_bytes(model, job.reference_quantization), "reference"))
        if adapters:
            states.append(State("adapters", adapters * job.trained_bytes, "weights"))
        return states
    if zero.stage < 3:
        states = [State("weights", base_weight_bytes(job) + adapters * BF16, "weights")]
        if job.reference_copy:
            states.append(State("reference", frozen_bytes(model, job.reference_quantization), "reference"))
        return states
    shard = math.ceil(model.parameters / world) * BF16
    if zero.offload_param == "cpu":
        # What is trained goes into a flat pinned buffer (stage3.py:747-770), the rest stays in partitions, one a tensor
        flat = math.ceil(job.trained_parameters / world) * BF16
        states = [State("weights", flat, "weights", "host_pinned")]
        states += _partitions(job, trained_tensors(job), "load_partitions", "load")
        states += _partitions(job, frozen_tensors(job), "weights", "weights")
        if job.reference_copy:
            states += _partitions(job, parameters_of(job), "reference", "reference")
        return states
    states = [State("weights", shard + math.ceil(adapters / world) * BF16, "weights")]
    if job.reference_copy:
        states.append(State("reference", shard, "reference"))
    return states


def _partitions(job: Job, tensors: Iterable[Tensor], tag: str, category: str) -> list[State]:
    """This rank's slices in host memory, each an allocation of its own (partition_parameters.py:1706-1709)."""
    space: Space = "host_pinned" if job.zero.param_pin_memory else "host_pageable"
    found = []
    for tensor in tensors:
        slices = math.ceil(tensor.elements / job.world_size) * BF16 * tensor.times
        found.append(State(f"{tag}.{tensor.name}", slices, category, space, tensor.times))
    return found


def optimizer_states(job: Job, sizes: ZeroSizes | None) -> list[State]:
    """Masters, Adam states and gradient buffers that stay once training runs."""
    zero, world = job.recipe.zero, job.world_size
    trained = job.trained_parameters
    if zero is None:
        states = moments(job, trained_tensors(job), job.updated_bytes)
        if job.recipe.badam is not None:
            blocks = sum(tensor.times for tensor in trained_tensors(job))
            states.append(State("master", trained * job.updated_bytes, "optimizer", blocks=blocks))
        if world > 1:  # DDP's buckets (torch/csrc/distributed/c10d/reducer.cpp; gradient_as_bucket_view is off)
            states.append(State("ddp_buckets", trained * job.trained_bytes, "gradients"))
        return states
    assert sizes is not None
    if zero.stage == 0:  # fp16/unfused_optimizer.py: every tensor's master, and its moments from init on
        master = State("master", trained * FP32, "optimizer", blocks=sum(t.times for t in trained_tensors(job)))
        first = [replace(state, tag=f"first_{state.tag}") for state in moments(job, trained_tensors(job), FP32)]
        return [master, *first]
    share = math.ceil(trained / world)
    if zero.offload_optimizer == "cpu":
        pinned: Space = "host_pinned" if zero.optimizer_pin_memory else "host_pageable"
        states = [
            State("master", share * FP32, "optimizer", "host_pageable" if zero.stage == 3 else pinned),
            State("moments", offloaded_states(job.recipe) * FP32 * share, "optimizer", "host_pageable"),
            *(
                State(f"grads_fp32.{number}", group.elements * FP32 * group.times, "gradients", pinned, group.times)
                for number, group in enumerate(flat_weights(job, sizes))
            ),
        ]
        if zero.stage < 3:  # temp_grad_buffer_for_gpu_offload and its pinned twin, stage_1_and_2.py:540-550
            largest = largest_tensor(job)
            states.append(State("offload_grad_buffer", largest * BF16, "buckets"))
            states.append(State("offload_grad_buffer_host", largest * BF16, "gradients", pinned))
        if zero.stage == 3:
            states.append(State("grad_partition", share * BF16, "gradients", pinned))
    else:
        subgroups = math.ceil(share / sizes.sub_group) if zero.stage == 3 else 1
        states = [
            State("master", share * FP32, "optimizer", blocks=subgroups),
            *moments(job, flat_weights(job, sizes), FP32),
        ]
        if zero.stage == 3:
            states.append(State("grad_partition", share * sizes.gradient_bytes, "gradients"))
    if zero.stage == 3 and zero.contiguous_gradients:
        states.append(State("reduce_bucket", sizes.reduce_bucket * BF16, "buckets"))
    return states
