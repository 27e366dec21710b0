"""`--gpu auto` plans for the tightest card that is visible, less what others use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dpofit.hardware.nvml import Reading, tightest, visible

GIB = 2**30


def card(name: str, usable_gib: float, used_gib: float = 0, uuid: str = "GPU-0", capability=(8, 0)) -> Reading:
    return Reading(name, uuid, int(usable_gib * GIB), int(used_gib * GIB), capability)


def test_capacity_is_the_least_left_by_others() -> None:
    a100 = "NVIDIA A100-SXM4-80GB"
    gpu = tightest([card(a100, 79.25), card(a100, 79.25, used_gib=10), card(a100, 79.25)])
    assert gpu.capacity_bytes == int(79.25 * GIB) - 10 * GIB
    assert "10.0 GiB used by others, the least of 3" in gpu.source


@pytest.mark.parametrize(
    ("nvml_name", "usable_gib", "profile", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.25, "a100-80g", 312),
        ("NVIDIA A100-PCIE-40GB", 39.5, "a100-40g", 312),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80g", 989),
        ("NVIDIA H20", 95.1, "h20-96g", 148),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090", 165.2),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32g", 125),
        ("Tesla T4", 14.7, "t4-16g", 65),
    ],
)
def test_a_card_nvml_names_gets_the_speeds_of_its_profile(nvml_name, usable_gib, profile, tflops) -> None:
    gpu = tightest([card(nvml_name, usable_gib)])
    assert (gpu.name, gpu.bf16_tflops) == (profile, tflops)


def test_a_card_without_a_profile_keeps_its_own_name_and_unknown_speed() -> None:
    gpu = tightest([card("NVIDIA RTX 6000 Ada Generation", 47.4)])
    assert (gpu.name, gpu.bf16_tflops) == ("NVIDIA RTX 6000 Ada Generation", None)


def test_bf16_follows_the_compute_capability() -> None:
    assert tightest([card("Quadro RTX 8000", 47, capability=(7, 5))]).bf16 is False
    assert tightest([card("NVIDIA RTX A6000", 47, capability=(8, 6))]).bf16 is True


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, ["GPU-aa", "GPU-ab", "GPU-c"]), ("2,0", ["GPU-c", "GPU-aa"]), ("GPU-c", ["GPU-c"]), ("GPU-a", []),
     ("0,7,1", ["GPU-aa"]), ("", [])],
)  # fmt: skip
def test_cuda_visible_devices_is_read_as_cuda_reads_it(variable: str | None, expected: list[str]) -> None:
    cards = [card("x", 24, uuid=uuid) for uuid in ("GPU-aa", "GPU-ab", "GPU-c")]
    assert [reading.uuid for reading in visible(cards, variable)] == expected


def test_without_a_card_auto_says_so_and_names_the_way_out() -> None:
    """Whatever this machine has, an empty CUDA_VISIBLE_DEVICES leaves no card, and NVML may be missing too."""
    code = (
        "from dpofit.errors import BadInput\n"
        "from dpofit.hardware.gpus import find_gpu\n"
        "try: find_gpu('auto')\n"
        "except BadInput as e: print(e)"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.startswith("command line: --gpu auto: ")
    assert "Name the card instead, such as --gpu a100-80g" in out.stdout
