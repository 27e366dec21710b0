"""How gradients are reduced below ZeRO-3: as they appear or in backward's epilogue, and what stays for the step."""

from __future__ import annotations

from dataclasses import replace

from dpofit.memory.job import Job
from dpofit.memory.overlay import Decisions, decide, lay, reduced_after
from dpofit.memory.part import Part
from dpofit.memory.partition import (
    BUCKETS,
    PARTITION,
    PartitionReducer,
    partition_bytes,
    places,
    rank_buffers,
    weight_groups,
)
from dpofit.memory.program import Event
from dpofit.memory.spec import BF16
from dpofit.memory.tape import Mark
from dpofit.memory.tensors import largest_tensor
from dpofit.memory.update import Items, comes_and_goes, end
from dpofit.memory.zero import ZeroSizes
from dpofit.memory.zero3 import ModuleIds


def partition_reducer(job: Job, sizes: ZeroSizes, ids: ModuleIds) -> PartitionReducer:
    """Of the backward that is shown first. ZeRO-1 reduces in a step's last micro-batch alone, as gradients appear with
    overlap_comm, else in its epilogue (stage_1_and_2.py:1547-1556)."""
    waits = job.zero_stage == 1 and (not job.zero.overlap_comm or job.recipe.gradient_accumulation > 1)
    return PartitionReducer(
        sizes.reduce_bucket, bucket_bytes(job, sizes), places(job, ids), rank_buffers(job), job.zero.reduce_scatter,
        checks=job.zero.offload_optimizer == "cpu", keeps=job.zero_stage == 1, deferred=waits,
    )  # fmt: skip


def _late(job: Job, sizes: ZeroSizes, ids: ModuleIds) -> PartitionReducer:
    """The buckets are there since the first gradient."""
    return replace(partition_reducer(job, sizes, ids), buffers=0, deferred=False)


def bucket_bytes(job: Job, sizes: ZeroSizes) -> int:
    """Reduce buckets, which ZeRO-1/2 allocate in each backward, two when they overlap, whole however little is trained
    (stage_1_and_2.py:2230-2253)."""
    return sizes.reduce_bucket * (2 if job.zero.overlap_comm else 1) * BF16


def reduced_at_the_end(job: Job, sizes: ZeroSizes, decisions: Decisions) -> Items:
    """ZeRO-1's reduce_gradients, weight by weight (stage_1_and_2.py:788-808)."""
    ids = decisions.ids
    order = [weight for group in weight_groups(job) for weight in group if weight.has_gradient]
    gradients = [(ids.module(weight.module, weight.layer), weight.elements) for weight in order]
    return [*reduced_after(gradients, _late(job, sizes, ids), decisions)]


def late_reducer(job: Job, sizes: ZeroSizes | None, ids: ModuleIds) -> PartitionReducer | None:
    """Of a step's last micro-batch, where gradients were added up until then."""
    if sizes is None or job.zero_stage != 1 or not job.zero.overlap_comm:
        return None
    return _late(job, sizes, ids)


def reduction_ends(job: Job, items: Items, kept: bool) -> tuple[Items, list[Event]]:
    """Backward's epilogue of ZeRO-1/2: (zeros for weights that got no gradient come, buckets go, gradients of others'
    partitions go, and unless `kept` the partition's own too, which have been added to others; what stays for the
    step)."""
    came = [item for item in items if isinstance(item, Event) and item.size_bytes > 0]
    buckets = [event for event in came if event.tag.startswith(BUCKETS)]
    partition = [event for event in came if event.tag.startswith(PARTITION)]
    whole = partition_bytes(job)
    own, zeros = (whole.buffer, whole.zeros) if job.zero.offload_optimizer == "none" else (0, 0)
    gone = list(map(end, buckets))
    if sum(event.size_bytes for event in partition) > own:  # stage 1: zero_grad (stage_1_and_2.py:888)
        gone += map(end, partition)
        partition = [Event(PARTITION, own, "gradients", "gpu", partition[0].stream)] if own else []
        gone += partition
    late = [Event("zeros_in_partition", zeros, "gradients")] if zeros else []
    partition += late
    return [*late, *gone, *([] if kept else map(end, partition))], partition


def unbucketed_reduction(job: Job) -> Items:
    """Stage 0 flattens up to 5e8 gradients, and the one that goes over, to reduce them together (engine.py
    allreduce_no_retain)."""
    return comes_and_goes(
        "reduce_copy", min(job.trained_parameters, 500_000_000 + largest_tensor(job)) * BF16, "buckets"
    )


def accumulate(parts: list[Part], reducer: PartitionReducer | None, ids: ModuleIds) -> tuple[Items, Items]:
    """A later micro-batch below ZeRO-2, and what of it goes in the step: each weight's gradient appears beside the one
    it is added to, and goes; that one too where `reducer` takes it."""
    added = [_added_in_place(part) for part in parts]
    laid = lay(added, decide(added, [], reducer, ids, reducer is not None))
    return [*laid["accumulate"], *laid.get("backward", [])], laid.get("optimizer_step", [])


def _added_in_place(part: Part) -> Part:
    records: list[Event | Mark] = []
    for record in part.records:
        if isinstance(record, Event) and record.tag.startswith("grad.") and record.size_bytes > 0:
            records.append(record._replace(tag=f"more.{record.tag}"))
        elif isinstance(record, Mark) and record.kind == "grad":
            records += [Event(f"more.grad.{record.module}", -record.size_bytes, "gradients"), record]
        else:
            records.append(record)
    phase = part.phase if part.phase == "optimizer_step" else "accumulate"
    return Part(phase, tuple(records), part.layers, part.reverse, part.engine, part.first)
