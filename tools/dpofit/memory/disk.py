"""Disk that checkpoints take: one of them, and all that stand at once."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.memory.job import Job
from dpofit.memory.optimizers import offloaded_states
from dpofit.memory.own_optimizers import update_for
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.tensors import Tensor, trained_tensors


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes on the shared output. `total_bytes` counts save_total_limit + 1 checkpoints (the oldest goes only after
    the new one is written: transformers trainer.py _save_checkpoint) and the final model; one without a limit."""

    checkpoint_bytes: int
    weights_bytes: int
    optimizer_bytes: int
    total_bytes: int


def _moments(job: Job, tensors: list[Tensor], element_bytes: int) -> int:
    """Bytes of the optimizer's own state, wherever it is."""
    updates = [(update_for(job.recipe, tensor, element_bytes), tensor.times) for tensor in tensors]
    return sum((sum(update.kept) + update.managed) * times for update, times in updates)


def disk_use(job: Job) -> DiskUse:
    """ZeRO-3: 12 B of optimizer a trained parameter and 2 B of weights; ZeRO-1/2 add the module's own 2 B."""
    recipe, trained = job.recipe, job.trained_parameters
    if not recipe.saves:
        return DiskUse(0, 0, 0, trained * job.trained_bytes if job.adapters else job.model.parameters * BF16)
    weights = trained * job.trained_bytes
    if not job.adapters:  # frozen weights are written too, as they are
        weights += (job.model.parameters - trained) * BF16
    if recipe.save_only_model:
        optimizer = 0
    elif recipe.zero is None:
        optimizer = _moments(job, trained_tensors(job), job.updated_bytes)
    else:
        moments = _moments(job, [Tensor("flat", (trained,), 1)], FP32)
        if recipe.zero.offload_optimizer == "cpu":
            moments = offloaded_states(recipe) * FP32 * trained
        optimizer = FP32 * trained + moments + (BF16 * trained if recipe.zero.stage < 3 else 0)
    checkpoint = weights + optimizer
    kept = recipe.save_total_limit + 1 if recipe.save_total_limit else 1
    return DiskUse(checkpoint, weights, optimizer, kept * checkpoint + weights)
