"""ZeRO-1/2: who owns the trained weights' partitions, and the bucket in which gradients reach them.

Source: deepspeed 0.18.4 runtime/zero/stage_1_and_2.py. Ranks differ in nothing else than the gradients of their
partition; what is shown at each moment is the rank that then has most of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from dpofit.memory.bands import inside_modules
from dpofit.memory.job import Job
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.tensors import trained_tensors
from dpofit.memory.zero3 import ModuleIds

FLOAT64 = 8
BUCKETS, PARTITION = "ipg_buckets", "grads_in_partition"  # as DeepSpeed names them
# Bytes an element of looking for overflow (_has_inf_or_nan): fp32, three masks, fp32 again
CHECK = FP32 + 3 + FP32


class Weight(NamedTuple):
    """A trained parameter; `module` is how the tape names its gradient."""

    module: str
    layer: int | None
    elements: int
    has_gradient: bool = True


Groups = tuple[tuple[Weight, ...], ...]


@dataclass(frozen=True, slots=True)
class PartitionBytes:
    """Of one rank, or the most of all: `buffer` from the first reduction on that touches it; `zeros` more from
    backward's end on, for weights that got no gradient; `looked_at` more, for a moment, in the step: for the norm, for
    overflow."""

    buffer: int
    zeros: int
    looked_at: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight lies: ranks `first` to `last`, `head` elements of it on the first of them, `share` on each of the
    others but the last. `standing`: those of them that stand for all."""

    first: int
    last: int
    head: int
    share: int
    standing: tuple[int, ...]


def partition_bytes(job: Job, looking: int = FLOAT64) -> PartitionBytes:
    """Every trained weight that touches a partition counts whole (:1447-1476); one without a gradient gets zeros
    (get_all_grad_tensors). `looking`: bytes an element of each slice that is looked at; get_grad_norm_direct takes it
    to float64."""
    ranks = _ranks(weight_groups(job), job.world_size, looking).values()
    buffer = max(rank.buffer for rank in ranks)
    held = max(rank.buffer + rank.zeros for rank in ranks)
    return PartitionBytes(buffer, held - buffer, max(_in_step(rank) for rank in ranks) - held)


def fullest_ranks(job: Job) -> tuple[int, ...]:
    """Ranks that between them have the most of every moment, in backward too, where those that the head touches get
    their gradients first; one where ranks don't differ."""
    if job.zero_stage not in (1, 2):
        return (0,)
    if job.zero.offload_optimizer != "none":  # the embedding and the head are looked through on the first and last
        return (0, job.world_size - 1)
    groups = weight_groups(job)
    ranks = _ranks(groups, job.world_size, FLOAT64)
    moments = (lambda one: one.buffer, lambda one: one.buffer + one.zeros, _in_step)
    fullest = {max(ranks, key=lambda rank: most(ranks[rank])) for most in moments}
    first_met = _starts(groups[0])[-1] // _share(groups[0], job.world_size)
    fullest.add(max((rank for rank in ranks if rank >= first_met), key=lambda rank: ranks[rank].buffer))
    return tuple(sorted(fullest))


def _in_step(rank: PartitionBytes) -> int:
    return rank.buffer + rank.zeros + rank.looked_at


def rank_buffers(job: Job) -> dict[int, int]:
    """Bytes for gradients, by rank that stands for itself or more; offloaded, they go to the host."""
    ranks = _ranks(weight_groups(job), job.world_size, FLOAT64)
    return {rank: one.buffer if job.zero.offload_optimizer == "none" else 0 for rank, one in ranks.items()}


def places(job: Job, ids: ModuleIds) -> dict[int, Place]:
    """Of every trained weight, by module."""
    world = job.world_size
    groups = weight_groups(job)
    standing = list(_ranks(groups, world, FLOAT64))
    found = {}
    for group in groups:
        share = _share(group, world)
        for weight, start in zip(group, _starts(group), strict=True):
            first, last = start // share, _last(start, weight.elements, share, world)
            inside = tuple(standing[bisect_left(standing, first) : bisect_right(standing, last)])
            head = min(weight.elements, (first + 1) * share - start)
            found[ids.module(weight.module, weight.layer)] = Place(first, last, head, share, inside)
    return found


def weight_groups(job: Job) -> Groups:
    """The optimizer's two groups, matrices and what has no weight decay, each in the order it is partitioned in
    (_round_robin_reorder)."""
    model, modules = job.model, job.trained
    inside = inside_modules(model)
    adapters = [tensor for tensor in trained_tensors(job) if tensor.role == "adapter"]
    matrices: list[Weight] = []
    vectors: list[Weight] = []
    if "embed_tokens" in modules.outside:
        matrices.append(Weight("embed_tokens", None, model.embedding_parameters))
    for layer, trained in enumerate(modules.layers):
        for linear, name in zip(model.linears, inside, strict=False):
            if name in trained:
                matrices.append(Weight(name, layer, linear.in_features * linear.out_features))
                vectors += [Weight(f"{name}.bias", layer, linear.out_features)] if linear.bias else []
        matrices += [Weight(tensor.name, layer, tensor.elements) for tensor in adapters]
        vectors += [Weight(norm, layer, width) for norm, width in model.norms if norm in trained]
    if "norm" in modules.outside:
        vectors.append(Weight("norm", None, model.hidden_size))
    if "lm_head" in modules.outside:  # a reward model's loss never reaches it
        matrices.append(Weight("lm_head", None, model.embedding_parameters, job.recipe.stage != "rm"))
    groups = [group for group in (matrices, vectors) if group]
    if job.zero.round_robin_gradients:
        world = job.world_size
        groups = [[one for at in range(min(world, len(group))) for one in group[at::world]] for group in groups]
    return tuple(tuple(group) for group in groups)


def _share(group: Iterable[Weight], world: int) -> int:
    return math.ceil(sum(weight.elements for weight in group) / world)


def _starts(group: Iterable[Weight]) -> list[int]:
    return list(accumulate((weight.elements for weight in group), initial=0))[:-1]


def _last(start: int, elements: int, share: int, world: int) -> int:
    return min((start + elements - 1) // share, world - 1)


@lru_cache(maxsize=64)
def _ranks(groups: Groups, world: int, looking: int) -> dict[int, PartitionBytes]:
    """What each rank needs, from the lowest up. Of ranks whose whole partition lies inside one weight only the first
    stands there: the others need as much."""
    spans = []
    standing = {0}
    for group in groups:
        share = _share(group, world)
        for weight, start in zip(group, _starts(group), strict=True):
            first, last = start // share, _last(start, weight.elements, share, world)
            spans.append((weight, start, share, first, last))
            standing |= {first, min(first + 1, last), last}
    ranks = sorted(standing)
    gradients, zeros, largest = (dict.fromkeys(ranks, 0) for _ in range(3))
    for weight, start, share, first, last in spans:
        kind = gradients if weight.has_gradient else zeros
        for rank in ranks[bisect_left(ranks, first) : bisect_right(ranks, last)]:
            kind[rank] += weight.elements * BF16
            within = min(start + weight.elements, (rank + 1) * share) - max(start, rank * share)
            largest[rank] = max(largest[rank], within * looking)
    found = {}
    for rank in ranks:
        some, none = gradients[rank], zeros[rank]
        # the buffer is made for all that touch it, when the first gradient comes
        found[rank] = PartitionBytes(some + none if some else 0, none, largest[rank])
    return found


@dataclass(slots=True)
class PartitionReducer:
    """The bucket (:1028-1076, :1483-1545). Its buffers come with the first gradient; a gradient is copied into it, one
    larger than it keeps its own storage until the next flushes it. A flush reduces, and the buffer of a rank's
    gradients comes with the first that touches its partition: of all ranks, the one that has most is shown."""

    elements: int
    buffers: int  # bytes, until they come
    places: Mapping[int, Place]
    partitions: Mapping[int, int]  # rank_buffers
    copies: bool  # reduce_scatter
    checks: bool  # gradients are looked through for overflow as they go to the host (:1431-1437)
    keeps: bool = False  # stage 1: one larger than the bucket stays where it has no partition (:1528-1542)
    deferred: bool = False  # gradients wait for a later backward, or the epilogue
    held: int = 0  # bytes of reduced gradients, on the rank that has most
    kept: int = 0  # bytes of those that stayed, on a rank that has a part of none
    apart: dict[int, int] = field(default_factory=dict)  # what a rank that has a part of some has beside `kept`
    filled: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (module, bytes) still in their own storage
    inside: list[tuple[int, int]] = field(default_factory=list)  # (module, elements)

    def add(self, module: int, elements: int, size_bytes: int) -> list[tuple[int | str, int]]:
        """(module, bytes): that gradient is freed; a copy of the bucket or a check come and go; a buffer comes."""
        done: list[tuple[int | str, int]] = []
        if self.buffers:
            done.append((BUCKETS, self.buffers))
            self.buffers = 0
        if self.deferred:
            return done
        if self.filled + elements > self.elements:
            done += self.flush()
        if elements <= self.elements:
            done.append((module, size_bytes))
        else:
            self.waiting.append((module, size_bytes))
        self.filled += elements
        self.inside.append((module, elements))
        return done

    def state(self, base: int) -> tuple[object, ...]:
        """No layer fares like the one before: each lies elsewhere in the partitions."""
        return (base,)

    def shift(self, distance: int) -> None:
        raise AssertionError("no two layers are alike")

    def flush(self) -> list[tuple[int | str, int]]:
        done: list[tuple[int | str, int]] = []
        if self.inside:
            found = [self.places[module] for module, _ in self.inside]
            copied = self._copied(found) if self.copies else 0
            if copied:
                done.append(("copy", copied * BF16))
            if self.checks:
                done.append(("check", max(elements for _, elements in self.inside) * CHECK))
            met = {rank for place in found for rank in place.standing}
            for rank in met:
                self.apart.setdefault(rank, self.partitions[rank])
            done += self._come(self.kept + max(self.apart[rank] for rank in met))
            done += self.waiting
            if self.keeps and self.waiting:  # alone in the bucket
                staying = sum(size_bytes for _, size_bytes in self.waiting)
                for rank in met:
                    self.apart[rank] -= staying
                self.kept += staying
                done += self._come(self.kept + max(self.apart.get(rank, 0) for rank in self.partitions))
        self.waiting, self.inside, self.filled = [], [], 0
        return done

    def _come(self, most: int) -> list[tuple[int | str, int]]:
        """What comes where a rank now has this many bytes of reduced gradients."""
        before, self.held = self.held, max(self.held, most)
        return [(f"{PARTITION}.{before}", most - before)] if most > before else []

    def _copied(self, found: list[Place]) -> int:
        """Elements that allreduce_bucket puts together in one tensor, the most at a time: the bucket's slices, of which
        neighbours on one rank are one, until they are more than a bucket; a slice alone is not copied (:1128-1162)."""
        if len({rank for place in found for rank in (place.first, place.last)}) == 1:
            return 0
        if self.filled <= self.elements:
            return self.filled
        place = found[0]  # alone: larger than the bucket
        more = 0 if place.head > self.elements else (self.elements - place.head) // place.share + 1
        group = min(self.filled, place.head + more * place.share)
        together = self.elements // place.share + 1
        rest = min(self.filled - group, together * place.share)
        return max(group if more else 0, rest if together > 1 else 0)
