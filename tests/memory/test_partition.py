"""ZeRO-1/2's partitions: the rank that needs most, found without walking the ranks of a large cluster one by one; and
when gradients reach it."""

import math
from dataclasses import replace

import pytest

from dpofit.memory.partition import PartitionReducer, partition_bytes, places, rank_buffers
from dpofit.memory.step import build_program, plan_steps
from dpofit.memory.zero3 import ModuleIds
from tests.memory.jobs import job, peaks, tiny, zero


def of_every_rank(groups: list[list[int]], world: int) -> tuple[int, int]:
    """(bf16 gradients of the weights that touch a partition, float64 of the largest slice), the most of any rank."""
    most_buffer = most_held = 0
    for rank in range(world):
        buffer = largest = 0
        for elements in groups:
            share = math.ceil(sum(elements) / world)
            low, high = rank * share, (rank + 1) * share
            for index, count in enumerate(elements):
                start = sum(elements[:index])
                inside = min(high, start + count) - max(low, start)
                buffer += 2 * count if inside > 0 else 0
                largest = max(largest, 8 * inside)
        most_buffer = max(most_buffer, buffer)
        most_held = max(most_held, buffer + largest)
    return most_buffer, most_held


def groups_of(model) -> list[list[int]]:
    """Elements of matrices, and of biases and norms, in the model's order."""
    table, width = model.vocab_size * model.hidden_size, model.hidden_size
    layer = [linear.in_features * linear.out_features for linear in model.linears]
    vectors = [linear.out_features for linear in model.linears if linear.bias] + [width for _, width in model.norms]
    return [[table, *layer * model.layers, table], [*vectors * model.layers, width]]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 24, 61, 400])
def test_the_fullest_rank_is_that_of_a_walk_over_all_of_them(world):
    model = tiny(layers=3, vocab=5000, hidden=64)
    found = partition_bytes(job(model, nodes=1, gpus=world, zero=zero(2)))
    assert (found.buffer, found.buffer + found.zeros + found.looked_at) == of_every_rank(groups_of(model), world)


def test_round_robin_gradients_deal_the_weights_out_to_the_ranks():
    model = tiny(layers=3, vocab=5000, hidden=64)
    dealt = [[one for rank in range(4) for one in group[rank::4]] for group in groups_of(model)]
    found = partition_bytes(job(model, nodes=1, gpus=4, zero=zero(2, round_robin_gradients=True)))
    assert (found.buffer, found.buffer + found.zeros + found.looked_at) == of_every_rank(dealt, 4)
    assert of_every_rank(dealt, 4) != of_every_rank(groups_of(model), 4)


def test_a_hundred_million_ranks_are_not_walked():
    model = tiny(layers=2, vocab=5000, hidden=64)
    most = partition_bytes(job(model, nodes=100_000, gpus=1000, zero=zero(2))).buffer
    assert most == (5000 * 64 + 64) * 2  # the embedding, and a norm of the other group


def reducer(bucket: int, keeps: bool = False) -> PartitionReducer:
    """Four ranks: the embedding lies on the first two, the head on the last two, the layer between them."""
    planned = job(tiny(layers=1, vocab=5000, hidden=64), nodes=1, gpus=4, zero=zero(2))
    found = places(planned, IDS)
    return PartitionReducer(bucket, 7, found, rank_buffers(planned), copies=True, checks=False, keeps=keeps)


IDS = ModuleIds(frozenset({"embed_tokens", "norm", "lm_head"}))
HEAD, NORM, EMBEDDING = (IDS.module(name, None) for name in ("lm_head", "norm", "embed_tokens"))
DOWN, UP = (IDS.module(name, 0) for name in ("down_proj", "up_proj"))
TABLE = 5000 * 64


def test_the_buckets_come_with_the_first_gradient():
    bucket = reducer(10**6)
    assert bucket.add(NORM, 64, 128) == [("ipg_buckets", 7), (NORM, 128)]
    assert bucket.add(DOWN, 64 * 256, 2 * 64 * 256) == [(DOWN, 2 * 64 * 256)]


def test_the_partitions_gradients_come_with_the_flush_that_first_touches_it():
    bucket = reducer(64 * 256)
    bucket.add(DOWN, 64 * 256, 0)
    third = 2 * (TABLE + 2 * 64 * 256 + 128)  # the head, the MLP's last two, 128 of vectors: all that touches rank 2
    assert ("grads_in_partition.0", third) in bucket.add(UP, 64 * 256, 0)
    second = 2 * (TABLE + 2 * 64 * 256 + 2 * 64 * 64 + 2 * 64 * 32 + 128)  # rank 1, of which UP has a part, has more
    assert bucket.flush()[-1] == (f"grads_in_partition.{third}", second - third)
    bucket.add(HEAD, TABLE, 0)
    assert not any(str(what).startswith("grads_in_partition") for what, _ in bucket.flush())


def test_a_bucket_that_one_rank_owns_is_reduced_where_it_lies():
    inside, across = reducer(10**6), reducer(10**6)
    inside.add(DOWN, 64 * 256, 0)
    assert "copy" not in dict(inside.flush())
    across.add(DOWN, 64 * 256, 0)
    across.add(EMBEDDING, TABLE, 0)
    assert dict(across.flush())["copy"] == 2 * (64 * 256 + TABLE)


def test_a_gradient_larger_than_the_bucket_waits_and_is_copied_by_ranks():
    bucket = reducer(TABLE // 4)
    bucket.add(EMBEDDING, TABLE, 2 * TABLE)
    done = dict(bucket.flush())
    assert done[EMBEDDING] == 2 * TABLE
    share = bucket.places[EMBEDDING].share
    assert share > TABLE // 4  # so each slice goes alone, as it lies
    assert "copy" not in done
    wider = reducer(TABLE - 1)
    wider.add(EMBEDDING, TABLE, 2 * TABLE)
    assert dict(wider.flush())["copy"] == 2 * TABLE


def test_in_stage_1_one_larger_than_the_bucket_stays_on_the_ranks_that_have_no_part_of_it():
    bucket = reducer(TABLE // 2, keeps=True)
    bucket.add(EMBEDDING, TABLE, 2 * TABLE)
    second = 2 * (TABLE + 2 * 64 * 256 + 2 * 64 * 64 + 2 * 64 * 32 + 128)  # rank 1's own, of which the embedding is one
    assert bucket.flush() == [("grads_in_partition.0", second), (EMBEDDING, 2 * TABLE)]
    bucket.add(HEAD, TABLE, 2 * TABLE)
    bucket.flush()
    assert bucket.held == second + 2 * TABLE  # rank 1 has no part of the head


@pytest.mark.parametrize(("stage", "overlap"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("fields", [{}, {"gradient_accumulation": 2}, {"stage": "rm"}, {"finetuning": "lora"}])
def test_what_backward_reduces_is_let_go_of_by_the_end_of_the_step(stage, overlap, fields):
    deepspeed = zero(stage, reduce_bucket_size=20_000, overlap_comm=overlap)
    planned = job(tiny(layers=5), gpus=8, zero=deepspeed, prompt=64, response=64, **fields)
    build_program(planned, plan_steps(planned)).check()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_step_meets_the_graph_of_the_last_micro_batch_however_many_there_are(stage):
    planned = job(tiny(), gpus=8, zero=zero(stage), prompt=64, response=64, finetuning="lora")
    two = replace(planned, recipe=replace(planned.recipe, gradient_accumulation=2))
    assert peaks(two)["optimizer_step"].size_bytes == peaks(planned)["optimizer_step"].size_bytes
