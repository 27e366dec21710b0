"""Pinned host memory is taken in powers of two, as torch's host allocator does."""

from __future__ import annotations

import pytest
from jobs import job, peaks

from dpofit.memory.host import HOST
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.recipe.recipe import ZeroConfig

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("size", "block"), [(0, 0), (1, 1), (2, 2), (3, 4), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, 2 * MIB)]
)
def test_a_request_is_rounded_up_to_a_power_of_two(size: int, block: int) -> None:
    assert pinned_block_bytes(size) == block


def test_a_72b_checkpoint_at_8k_plus_1k_takes_512_mib_so_80_layers_take_40_gib_a_rank() -> None:
    one = 2 * 9216 * 8192 * 2  # two rows, bf16: 302 MB
    assert pinned_block_bytes(one) == 512 * MIB
    assert 80 * pinned_block_bytes(one) == 40 * GIB


def test_above_the_round_threshold_a_request_is_taken_as_it_is() -> None:
    assert pinned_block_bytes(300 * MIB, round_threshold_bytes=256 * MIB) == 300 * MIB
    assert pinned_block_bytes(200 * MIB, round_threshold_bytes=256 * MIB) == 256 * MIB


def test_offloaded_weights_are_pinned_tensor_by_tensor_while_loading_and_where_they_stay_frozen() -> None:
    """Slices of a 7B on 8 ranks: gate, up and down 16.2 MiB → 32, q and o 3.06 → 4, k and v 448 KiB → 512, embeddings
    and head 129.9 MiB → 256. Biases and norms are less than 1 MiB in all."""
    layers = 28 * (3 * 32 + 2 * 4 + 2 * 0.5)
    slices = (layers + 2 * 256) * MIB
    zero = ZeroConfig("z3", 3, offload_optimizer="cpu", offload_param="cpu", param_pin_memory=True)
    full, lora = (
        job("Qwen/Qwen2.5-7B", nodes=1, zero=zero, finetuning=kind, host_gib=1000) for kind in ("full", "lora")
    )
    loaded = peaks(full, HOST)["load"].breakdown
    assert loaded["load"] == pytest.approx(slices, abs=MIB)
    assert loaded["reference"] == loaded["load"]
    assert loaded["weights"] == 2 * GIB  # 1.77 GiB in one flat buffer
    assert peaks(lora, HOST)["load"].breakdown["weights"] == pytest.approx(slices + 8 * MIB, abs=MIB)  # flat: adapters


def test_without_pin_memory_partitions_are_pageable_and_go_when_the_flat_buffer_is_there() -> None:
    zero = ZeroConfig("z3", 3, offload_optimizer="cpu", offload_param="cpu")
    found = peaks(job("Qwen/Qwen2.5-7B", nodes=1, zero=zero, host_gib=1000), HOST)
    slices = 7_615_616_512 * 2 / 8
    assert found["load"].breakdown["load"] == pytest.approx(slices, rel=1e-4)
    assert "load" not in found["forward"].breakdown
