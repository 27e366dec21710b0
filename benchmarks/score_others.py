"""What other estimators print for the same job: DeepSpeed's for model states, `accelerate estimate-memory`.

Transcribed, since neither library is a dependency; tests/benchmarks compares them with the real ones.
"""

from __future__ import annotations

from dpofit.memory.job import Job


def deepspeed_gpu_bytes(job: Job) -> int | None:
    """deepspeed runtime/zero/stage3.py estimate_zero3_model_states_mem_needs and stage_1_and_2.py's for ZeRO-2: every
    parameter trained, no activations. None below ZeRO-2."""
    total, gpus = job.model.parameters, job.world_size
    if job.zero_stage == 3:
        largest = 4 * job.model.embedding_parameters
        if job.zero.offload_param == "cpu":
            return largest
        if job.zero.offload_optimizer == "cpu":
            return largest + 2 * total // gpus
        return largest + 18 * total // gpus
    if job.zero_stage == 2:
        return 2 * total if job.zero.offload_optimizer == "cpu" else 2 * total + 18 * total // gpus
    return None


def accelerate_bytes(job: Job) -> int:
    """accelerate 1.11.0 commands/estimate.py estimate_training_usage, bfloat16: the largest of the model and its
    gradients, and Adam's two fp32 states; one GPU, no activations, no batch."""
    return 8 * job.model.parameters
