"""What stays for the whole run: weights, masters, optimizer states, gradient buffers, reference; per rank.

Sources: deepspeed 0.18.4 runtime/zero/stage3.py:590-628 (buffers), 905-1026 (fp32 partitions), stage_1_and_2.py:
414-449;
llamafactory 0.9.5 model/adapter.py:316-346; bitsandbytes nn/modules.py (4-bit), optim/optimizer.py (8-bit).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpofit.memory.job import Job
from dpofit.memory.program import Space
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.tensors import largest_tensor, parameter_tensors, trained_tensors
from dpofit.memory.zero import ZeroSizes

# bitsandbytes functional.py quantize_4bit: one fp32 absmax per 64 weights; double quantization stores it in 8 bits
# with one fp32 per 256 of them (create 8-bit blockwise) and a 256-entry code book.
NF4_BLOCK, NESTED_BLOCK = 64, 256
# bitsandbytes optim/optimizer.py: 8-bit states keep one fp32 absmax per 256 elements; below 4,096 elements fp32.
OPTIM8_BLOCK = 256


@dataclass(frozen=True, slots=True)
class State:
    """A buffer that lives from `phase` on; `until_init` marks one that goes when init ends."""

    tag: str
    size_bytes: int
    category: str
    space: Space = "gpu"
    blocks: int = 1  # allocations it is made of: pinned ones are rounded each, GPU ones reuse what is free


def quantized_layer_bytes(job: Job) -> int:
    """Bytes of one decoder layer's frozen weights on the GPU, 4-bit when quantized."""
    model = job.model
    if job.recipe.quantization_bit != 4:
        return model.layer_parameters * BF16
    weights = sum(linear.in_features * linear.out_features for linear in model.linears)
    others = model.layer_parameters - weights
    blocks = weights / NF4_BLOCK
    absmax = blocks * (1 + FP32 / NESTED_BLOCK) if job.recipe.double_quantization else blocks * FP32
    return math.ceil(weights / 2 + absmax) + others * BF16


def base_weight_bytes(job: Job) -> int:
    """Bytes of the whole frozen or bf16 model."""
    model = job.model
    embeddings = model.embedding_parameters * (1 if model.tied_embeddings else 2) + model.hidden_size
    return model.layers * quantized_layer_bytes(job) + embeddings * BF16


def adam_bytes(job: Job, elements: int) -> tuple[int, int]:
    """Optimizer state bytes for `elements` trained elements, as (on the GPU, in managed memory that can leave it)."""
    optim = job.recipe.optim
    element_bytes = FP32 if job.recipe.zero is not None else job.trained_bytes
    state_bytes = 2 * element_bytes * elements
    if "8bit" in optim:
        embeddings = 0
        if job.full and job.recipe.zero is None:  # embeddings keep 32-bit states (transformers trainer_optimizer.py)
            embeddings = min(elements, job.model.embedding_parameters)
        state_bytes = math.ceil(2 * (elements - embeddings) * (1 + FP32 / OPTIM8_BLOCK)) + 2 * FP32 * embeddings
    if "paged" in optim:
        return 0, state_bytes
    return state_bytes, 0


def weight_states(job: Job) -> list[State]:
    """Weights of policy and reference, at load."""
    world, model, zero = job.world_size, job.model, job.recipe.zero
    adapters = 0 if job.full else job.trained_parameters
    if zero is None:
        states = [
            State("weights", job.trained_bytes * model.parameters if job.full else base_weight_bytes(job), "weights")
        ]
        if job.reference_copy:
            states.append(State("reference", base_weight_bytes(job), "reference"))
        if adapters:
            states.append(State("adapters", adapters * job.trained_bytes, "weights"))
        return states
    if zero.stage < 3:
        states = [State("weights", base_weight_bytes(job) + adapters * BF16, "weights")]
        if job.reference_copy:
            states.append(State("reference", base_weight_bytes(job), "reference"))
        return states
    shard = math.ceil(model.parameters / world) * BF16
    if zero.offload_param == "cpu":
        # one flat pinned buffer for the policy (stage3.py:747-770); the reference stays in pinned partitions per tensor
        tensors = parameter_tensors(job)
        states = [State("weights", shard + math.ceil(adapters / world) * BF16, "weights", "host_pinned")]
        states.append(State("load_partitions", shard, "load", "host_pinned", tensors))
        if job.reference_copy:
            states.append(State("reference", shard, "reference", "host_pinned", tensors))
        return states
    states = [State("weights", shard + math.ceil(adapters / world) * BF16, "weights")]
    if job.reference_copy:
        states.append(State("reference", shard, "reference"))
    return states


def optimizer_states(job: Job, sizes: ZeroSizes | None) -> list[State]:
    """Masters, Adam states and gradient buffers that stay once training runs."""
    zero, world = job.recipe.zero, job.world_size
    trained = job.trained_parameters
    if zero is None:
        gpu, managed = adam_bytes(job, trained)
        states = [
            State("adam", gpu, "optimizer", blocks=2 * trained_tensors(job)),
            State("adam_paged", managed, "optimizer", "host_pageable"),
        ]
        if world > 1:  # DDP's buckets (torch/csrc/distributed/c10d/reducer.cpp; gradient_as_bucket_view is off)
            states.append(State("ddp_buckets", trained * job.trained_bytes, "gradients"))
        return states
    assert sizes is not None
    share = math.ceil(trained / world)
    gpu, managed = adam_bytes(job, share)
    if zero.offload_optimizer == "cpu":
        subgroups = math.ceil(share / sizes.sub_group)
        pinned: Space = "host_pinned" if zero.optimizer_pin_memory else "host_pageable"
        states = [
            State("master", share * FP32, "optimizer", "host_pageable" if zero.stage == 3 else pinned),
            State("adam", 2 * FP32 * share, "optimizer", "host_pageable"),
            State("grads_fp32", share * FP32, "gradients", pinned, subgroups),
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
            State("adam", gpu, "optimizer", blocks=2 * subgroups),
            State("adam_paged", managed, "optimizer", "host_pageable"),
        ]
        if zero.stage == 3:
            states.append(State("grad_partition", share * sizes.gradient_bytes, "gradients"))
    if zero.stage == 3 and zero.contiguous_gradients:
        states.append(State("reduce_bucket", sizes.reduce_bucket * BF16, "buckets"))
    return states
