"""Pinned host memory is taken in powers of two, as torch's host allocator does."""

from __future__ import annotations

import pytest

from dpofit.memory.pinned import pinned_block_bytes

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
