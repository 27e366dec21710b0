"""ZeRO-1/2: the gradients a rank holds for its partition of the trained weights, on the rank that needs most.

Source: deepspeed 0.18.4 runtime/zero/stage_1_and_2.py. Ranks differ in nothing else, so the most of every moment is
some rank's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpofit.memory.bands import inside_modules
from dpofit.memory.job import Job
from dpofit.memory.program import Event
from dpofit.memory.spec import BF16
from dpofit.memory.tensors import trained_tensors

FLOAT64 = 8


@dataclass(frozen=True, slots=True)
class PartitionBytes:
    """Of one rank, or the most of all: `buffer` from the first reduction on; `zeros` more from backward's end on, for
    weights that got no gradient; `looked_at` more, for a moment, in the step: for the norm, for overflow."""

    buffer: int
    zeros: int
    looked_at: int


def partition_bytes(job: Job, looking: int = FLOAT64) -> PartitionBytes:
    """Every trained matrix that touches a partition counts whole (:1447-1476); one without a gradient gets zeros
    (get_all_grad_tensors). `looking`: bytes an element of each slice that is looked at; get_grad_norm_direct takes it
    to float64. Biases and norms, a group of their own, are left out."""
    ranks = _ranks(job, looking).values()
    buffer = max(rank.buffer for rank in ranks)
    held = max(rank.buffer + rank.zeros for rank in ranks)
    return PartitionBytes(buffer, held - buffer, max(_in_step(rank) for rank in ranks) - held)


def partition_gradients(job: Job) -> list[Event]:
    """What comes with the first reduction, and in backward's epilogue, unless gradients go to the host."""
    if job.zero_stage not in (1, 2) or job.zero.offload_optimizer != "none":
        return []
    most = partition_bytes(job)
    buffer = Event("grads_in_partition", most.buffer, "gradients")
    return [buffer, *([Event("zeros_in_partition", most.zeros, "gradients")] if most.zeros else [])]


def fullest_ranks(job: Job) -> tuple[int, ...]:
    """Ranks that between them have the most of every moment; one where ranks don't differ."""
    if job.zero_stage not in (1, 2):
        return (0,)
    if job.zero.offload_optimizer != "none":  # the embedding and the head are looked through on the first and last
        return (0, job.world_size - 1)
    ranks = _ranks(job, FLOAT64)
    moments = (lambda one: one.buffer, lambda one: one.buffer + one.zeros, _in_step)
    return tuple(sorted({max(ranks, key=lambda rank: most(ranks[rank])) for most in moments}))


def _in_step(rank: PartitionBytes) -> int:
    return rank.buffer + rank.zeros + rank.looked_at


def _ranks(job: Job, looking: int) -> dict[int, PartitionBytes]:
    """What each rank needs, from the lowest up. Of ranks whose whole partition lies inside one matrix only the first
    stands there: the others need as much."""
    matrices = _matrices(job)
    world, start = job.world_size, 0
    share = math.ceil(sum(elements for elements, _ in matrices) / world)
    gradients: dict[int, int] = {}
    zeros: dict[int, int] = {}
    largest = {0: 0}
    for elements, has_gradient in matrices:
        first, last = start // share, min((start + elements - 1) // share, world - 1)
        for rank in {first, min(first + 1, last), last}:
            kind = gradients if has_gradient else zeros
            kind[rank] = kind.get(rank, 0) + elements * BF16
            inside = min(start + elements, (rank + 1) * share) - max(start, rank * share)
            largest[rank] = max(largest.get(rank, 0), inside * looking)
        start += elements
    found = {}
    for rank in sorted(largest):
        some, none = gradients.get(rank, 0), zeros.get(rank, 0)
        # the buffer is made for all that touch it, when the first gradient comes
        found[rank] = PartitionBytes(some + none if some else 0, none, largest[rank])
    return found


def _matrices(job: Job) -> list[tuple[int, bool]]:
    """(elements, whether it gets a gradient) of each trained matrix, in the model's order."""
    model, modules = job.model, job.trained
    inside = inside_modules(model)
    adapters = [(tensor.elements, True) for tensor in trained_tensors(job) if tensor.role == "adapter"]
    found = [(model.embedding_parameters, True)] if "embed_tokens" in modules.outside else []
    for layer in modules.layers:
        linears = zip(model.linears, inside, strict=False)
        found += [(linear.in_features * linear.out_features, True) for linear, name in linears if name in layer]
        found += adapters
    if "lm_head" in modules.outside:  # a reward model's loss never reaches it
        found.append((model.embedding_parameters, job.recipe.stage != "rm"))
    return found
