"""What each optimizer keeps and needs, against bytes worked out by hand."""

from __future__ import annotations

import pytest
from jobs import job, peaks, tiny, zero

from dpofit.errors import BadInput
from dpofit.memory.optimizers import OPTIMIZERS, update_of
from dpofit.memory.predict import predict
from dpofit.memory.tensors import Tensor
from dpofit.recipe.keys import known_keys

MATRIX = Tensor("linear", (1000, 400), 1)  # 400,000 elements: 1,562.5 blocks of 256
BIAS = Tensor("vector", (400,), 1)
HOST = frozenset({"host_pageable"})


def alone(optim: str, **recipe):
    return job(tiny(), nodes=1, gpus=1, prompt=8, response=8, optim=optim, **recipe)


def of(optim: str, tensor: Tensor = MATRIX, element_bytes: int = 2):
    return update_of(alone(optim).recipe, tensor, element_bytes)


def test_adamw_keeps_two_tensors_like_the_weight_and_foreach_needs_a_third_of_all_at_once():
    assert of("adamw_torch").kept == (800_000, 800_000)
    fused, foreach = (peaks(alone(name, pure_bf16=True, stage="sft"))["optimizer_step"].breakdown
                      for name in ("adamw_torch_fused", "adamw_torch"))  # fmt: skip
    assert "optimizer_workspace" not in fused
    assert foreach["optimizer_workspace"] == 2 * tiny().parameters


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix_and_copies_bf16_to_fp32():
    assert of("adafactor").kept == (4000, 1600)
    assert of("adafactor", BIAS).kept == (1600,)
    assert of("adafactor").temporary == 4 * 1_600_000  # gradient, weight, update twice
    assert of("adafactor", element_bytes=4).temporary == 2 * 1_600_000


def test_lion_keeps_one_fp32_tensor_and_ademamix_three():
    assert of("lion_32bit").kept == (1_600_000,)
    assert sum(of("ademamix").kept) == 3 * 1_600_000


def test_eight_bits_are_a_byte_and_an_fp32_maximum_for_256_but_not_for_embeddings_and_small_tensors():
    assert of("adamw_8bit").kept == (400_000, 400_000, 1563 * 4, 1563 * 4)
    assert of("adamw_8bit", Tensor("embedding", (1000, 400), 1)).kept == (1_600_000, 1_600_000)
    assert of("adamw_8bit", BIAS).kept == (1600, 1600)
    assert of("lion_8bit").kept == (400_000, 1563 * 4)


def test_paged_states_leave_the_card_except_small_tensors_and_the_maxima():
    assert of("paged_adamw_8bit").managed == 800_000
    assert of("paged_adamw_8bit").kept == (1563 * 4, 1563 * 4)
    adapter = Tensor("adapter", (8, 4096), 1)  # 32,768 elements, below 100,000
    assert of("paged_adamw_32bit", adapter).managed == 0
    assert of("paged_adamw_32bit", adapter).kept == (131_072, 131_072)


def test_torchao_packs_two_moments_into_four_bits():
    tensor = Tensor("linear", (1024, 400), 1)  # 1,600 blocks of 256
    assert sum(of("adamw_torch_4bit", tensor).kept) == 2 * (204_800 + 6_400)


def test_sgd_keeps_nothing_and_weight_decay_costs_a_copy_of_the_gradients():
    plain, decayed = (peaks(alone("sgd", pure_bf16=True, stage="sft", weight_decay=decay))["optimizer_step"].breakdown
                      for decay in (0.0, 0.1))  # fmt: skip
    assert "optimizer" not in plain and "optimizer_workspace" not in plain
    assert decayed["optimizer_workspace"] == 2 * tiny().parameters


def test_schedule_free_keeps_z_and_a_second_moment():
    assert of("schedule_free_adamw").kept == (800_000, 800_000)
    assert of("schedule_free_sgd").kept == (800_000,)


def test_under_zero_an_optimizer_sees_flat_fp32():
    planned = job(tiny(), nodes=1, gpus=8, prompt=8, response=8, optim="adafactor", zero=zero(3))
    share = -(-tiny().parameters // 8)
    step = peaks(planned)["optimizer_step"].breakdown
    assert step["optimizer"] == share * (4 + 4)  # master and, unfactored, a second moment
    assert step["optimizer_workspace"] == share * (4 + 8)  # fp32 gradients, update twice


@pytest.mark.parametrize(("optim", "state_bytes"), [("adamw_8bit", 8), ("sgd", 8), ("lion_32bit", 4)])
def test_offloaded_every_optimizer_but_lion_becomes_deepspeeds_cpu_adam(optim, state_bytes):
    offloaded = zero(2, offload_optimizer="cpu")
    planned = job(tiny(), nodes=1, gpus=8, prompt=8, response=8, optim=optim, zero=offloaded)
    share = -(-tiny().parameters // 8)
    assert peaks(planned, HOST)["forward"].breakdown["optimizer"] == share * (state_bytes + 4)


def test_deepspeed_refuses_adagrad_offloaded_and_so_do_we():
    with pytest.raises(BadInput, match="DeepSpeed refuses"):
        predict(job(tiny(), optim="adagrad", zero=zero(2, offload_optimizer="cpu")))


def test_every_name_of_the_trainer_is_modelled_or_refused_by_its_name():
    names = known_keys()["optim"].choices
    assert set(OPTIMIZERS) < set(names)
    for name in set(names) - set(OPTIMIZERS):
        with pytest.raises(BadInput, match=f"{name} is not modelled"):
            predict(alone(name))
