"""Layer inputs lie densely in host memory, which every step and every length uses again."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dpofit.train.longdpo import SLAB_BYTES  # noqa: E402
from dpofit.train.longdpo.host_stack import HostStack  # noqa: E402
from dpofit.train.longdpo.offload_checkpoints import LayerInputs, _slab_maker  # noqa: E402
from dpofit.units import GIB  # noqa: E402

pytestmark = pytest.mark.stack


def stack(slab_bytes: int) -> HostStack:
    return HostStack(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), slab_bytes)


def test_a_72b_at_8k_and_1k_needs_22_5_gib_a_rank_where_unsloth_gc_takes_40() -> None:
    layers, nbytes = 80, 2 * 9216 * 8192 * 2  # two rows of 8,192 + 1,024 tokens, 8,192 wide, bf16: 301,989,888 bytes
    inputs = HostStack(lambda size: torch.empty(size, dtype=torch.uint8, device="meta"))
    for _ in range(layers):
        inputs.take(nbytes)
    assert inputs.held_bytes / GIB == 22.5
    rounded = 2 ** (nbytes - 1).bit_length()  # what torch makes of each of unsloth gc's blocks
    assert layers * rounded / GIB == 40


def test_torch_rounds_no_slab_up() -> None:
    assert 2 ** (SLAB_BYTES - 1).bit_length() == SLAB_BYTES


def test_any_mix_of_lengths_needs_no_more_than_its_longest_step() -> None:
    memory = stack(4096)
    highest = 0
    for lengths in ([5000, 700, 9000], [512] * 7, [14000], [1, 2, 3]):
        extents = [memory.take(length) for length in lengths]
        highest = max(highest, sum(-(-length // 512) * 512 for length in lengths))
        for extent in reversed(extents):
            memory.give_back(extent)
        assert memory.used_bytes == 0
    assert memory.held_bytes == -(-highest // 4096) * 4096


def test_what_is_given_back_out_of_turn_is_used_again_when_all_above_has_gone() -> None:
    memory = stack(4096)
    low, middle, high = (memory.take(1000) for _ in range(3))
    memory.give_back(middle)
    assert memory.used_bytes == 3 * 1024
    memory.give_back(high)
    assert memory.used_bytes == 1024
    memory.give_back(low)
    assert memory.used_bytes == 0


def test_an_extent_across_slabs_comes_in_pieces_that_cover_it_once() -> None:
    memory = stack(1024)
    memory.take(600)  # the next extent begins at 1,024, the alignment above
    pieces = list(memory.pieces(memory.take(2500)))
    assert [(first, last) for _, first, last in pieces] == [(0, 1024), (1024, 2048), (2048, 2500)]
    assert [piece.numel() for piece, _, _ in pieces] == [1024, 1024, 452]


def test_inputs_come_back_bit_for_bit_whatever_their_shape_and_dtype() -> None:
    inputs = LayerInputs(torch.device("cpu"), stack(1024))
    originals = [
        torch.randn(2, 7, 33).bfloat16(), torch.randn(3, 5), torch.randn(4, 6, 8).transpose(0, 2), torch.randn(1000)
    ]  # fmt: skip
    kept = [inputs.keep(original) for original in originals]
    for original, one in reversed(list(zip(originals, kept, strict=True))):
        back = inputs.fetch(one)
        assert back.dtype == original.dtype and torch.equal(back, original)


def test_backward_finds_the_next_input_fetched_already_and_no_other() -> None:
    inputs = LayerInputs(torch.device("cpu"), stack(1024))
    kept = [inputs.keep(torch.full((8,), float(layer))) for layer in range(4)]
    for layer in (3, 2, 1, 0):
        inputs.fetch(kept[layer])
        on_device = [place for place, one in enumerate(kept) if one is not None and one.on_device is not None]
        assert on_device == ([layer - 1] if layer else [])
        kept[layer] = None  # type: ignore[call-overload]
    assert inputs.stack.used_bytes == 0


def test_in_forward_only_the_input_that_is_leaving_is_still_on_the_device() -> None:
    inputs = LayerInputs(torch.device("cpu"), stack(1024))
    kept = [inputs.keep(torch.ones(8)) for _ in range(3)]
    assert [one.on_device is not None for one in kept] == [False, False, True]


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    inputs = LayerInputs(torch.device("cpu"), stack(1024))
    for _ in range(3):
        inputs.keep(torch.ones(300))
    inputs.keep(torch.ones(1))  # the one before had still been leaving
    assert inputs.stack.held_bytes <= 3 * 2048
    assert inputs.stack.used_bytes <= 2048


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_memory_that_can_t_be_pinned_is_pageable_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    make = _slab_maker(torch.device("cuda"))
    assert make(4096).numel() == make(4096).numel() == 4096
    told = capsys.readouterr().out
    assert told.count("goes on with pageable memory") == 1
    assert "pinning 4,096 bytes failed: " in told
