"""`--gpu` takes a card's name or an exact size, and says where every figure comes from."""

from __future__ import annotations

import pytest

from dpofit.errors import BadInput
from dpofit.hardware.gpus import find_gpu, gpu_names

GIB = 2**30


def test_every_promised_name_is_known() -> None:
    promised = (
        "a100-40g a100-80g a800-80g h100-80g h20-96g h200-141g b200-180g l40s-48g l20-48g a40-48g a10-24g "
        "rtx3090 rtx4090 rtx5090 v100-16g v100-32g t4-16g"
    )
    assert sorted(gpu_names()) == sorted(promised.split())


def test_an_a100_has_what_torch_printed_for_it_not_the_number_on_the_box() -> None:
    card = find_gpu("a100-80g")
    assert card.capacity_bytes // 2**20 == 81_049  # 79.15 GiB, in whole MiB
    assert "litgpt" in card.source


@pytest.mark.parametrize("name", gpu_names())
def test_capacity_is_below_the_box_and_above_nine_tenths_of_it(name: str) -> None:
    box_gib = {"rtx3090": 24, "rtx4090": 24, "rtx5090": 32}.get(name) or int(name.rpartition("-")[2][:-1])
    # H20, H200 and B200 are sold in decimal gigabytes or rounded up
    assert 0.9 * box_gib < find_gpu(name).capacity_bytes / GIB < box_gib


@pytest.mark.parametrize("name", gpu_names())
def test_every_card_says_how_its_capacity_and_its_context_are_known(name: str) -> None:
    source = find_gpu(name).source
    assert source.startswith(("printed", "reported", "derived"))
    assert "context" in source
    assert "measured" in source or "assumed" in source


def test_only_cards_before_ampere_lack_bf16() -> None:
    assert [name for name in gpu_names() if not find_gpu(name).bf16] == ["v100-16g", "v100-32g", "t4-16g"]


def test_speeds_are_those_of_the_data_sheets() -> None:
    assert (find_gpu("a100-80g").bf16_tflops, find_gpu("h100-80g").bf16_tflops) == (312, 989)
    assert (find_gpu("a100-80g").pcie_gb_per_s, find_gpu("h100-80g").pcie_gb_per_s) == (31.5, 63.0)


@pytest.mark.parametrize("written", ["A100-80G", "a100-80GB", "A100 80GB", " a100_80g "])
def test_a_name_may_be_written_the_ways_people_write_it(written: str) -> None:
    assert find_gpu(written).name == "a100-80g"


@pytest.mark.parametrize(("size", "expected"), [("64GiB", 64 * GIB), ("80GB", 80 * 10**9), ("23.5 GiB", 25232932864)])
def test_a_size_is_exact(size: str, expected: int) -> None:
    card = find_gpu(size)
    assert card.capacity_bytes == expected
    assert card.bf16_tflops is None


def test_an_ambiguous_name_is_answered_with_the_cards_it_could_be() -> None:
    with pytest.raises(BadInput, match="Did you mean a100-40g or a100-80g"):
        find_gpu("a100")


def test_a_number_alone_is_taken_for_a_name() -> None:
    with pytest.raises(BadInput, match="Did you mean rtx4090"):
        find_gpu("4090")


def test_an_unknown_name_is_answered_with_all_names() -> None:
    with pytest.raises(BadInput, match=r"Known: a100-40g a100-80g .* t4-16g; or a size such as 64GiB, or auto"):
        find_gpu("voodoo2")


@pytest.mark.parametrize("size", ["64", "80XB", "512MiB"])
def test_a_size_without_a_sensible_unit_is_refused(size: str) -> None:
    with pytest.raises(BadInput, match="--gpu"):
        find_gpu(size)


def test_every_known_card_but_v100_and_t4_has_bf16() -> None:
    assert {name for name in gpu_names() if not find_gpu(name).bf16} == {"v100-16g", "v100-32g", "t4-16g"}
    assert all(find_gpu(name).compute_capability for name in gpu_names())
    assert find_gpu("64GiB").bf16
