"""ZeRO-1/2's partitions: the rank that needs most, found without walking the ranks of a large cluster one by one."""

import math

import pytest

from dpofit.memory.partition import partition_bytes
from tests.memory.jobs import job, tiny, zero


def of_every_rank(elements: list[int], world: int) -> tuple[int, int]:
    """(bf16 gradients of the matrices that touch a partition, float64 of the largest slice), the most of any rank."""
    share = math.ceil(sum(elements) / world)
    starts = [sum(elements[:index]) for index in range(len(elements))]
    most_buffer = most_held = 0
    for rank in range(world):
        low, high = rank * share, (rank + 1) * share
        inside = [min(high, start + count) - max(low, start) for start, count in zip(starts, elements, strict=True)]
        buffer = sum(2 * count for count, here in zip(elements, inside, strict=True) if here > 0)
        most_buffer = max(most_buffer, buffer)
        most_held = max(most_held, buffer + 8 * max(*inside, 0))
    return most_buffer, most_held


@pytest.mark.parametrize("world", [1, 2, 3, 7, 24, 61, 400])
def test_the_fullest_rank_is_that_of_a_walk_over_all_of_them(world):
    model = tiny(layers=3, vocab=5000, hidden=64)
    layer = [linear.in_features * linear.out_features for linear in model.linears]
    matrices = [5000 * 64, *layer * 3, 5000 * 64]
    found = partition_bytes(job(model, nodes=1, gpus=world, zero=zero(2)))
    assert (found.buffer, found.buffer + found.zeros + found.looked_at) == of_every_rank(matrices, world)


def test_a_hundred_million_ranks_are_not_walked():
    model = tiny(layers=2, vocab=5000, hidden=64)
    assert partition_bytes(job(model, nodes=100_000, gpus=1000, zero=zero(2))).buffer == 5000 * 64 * 2
