"""tiled_mlp, offload_checkpoints and cached_reference under real DeepSpeed ZeRO-3, on one pair of ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.guard.ranks import run_ranks, values
from tests.longdpo.runs import Case

pytestmark = pytest.mark.stack

ALL = bool(os.environ.get("DPOFIT_TEST_ALL"))
THREE = ("cached_reference", "tiled_mlp", "offload_checkpoints")
STEPS = 20 if ALL else 3
ASKED: list[tuple[Case, Sequence[Collection[str]]]] = [
    (Case(batch=2, accumulation=2, steps=STEPS), [THREE, *(((one,) for one in THREE) if ALL else ())]),
    (Case(tuning="lora", batch=2, steps=STEPS), [THREE, *(((one,) for one in THREE) if ALL else ())]),
]


def compare(folder: str, asked: Any) -> Any:
    from dpofit.train.longdpo import tiled_mlp
    from tests.longdpo.zero3 import compare_all

    tiled_mlp.TILE_TOKENS = 16  # else the tiny rows would be one tile
    return compare_all(folder, asked)


def test_two_zero3_ranks_train_as_with_stock_code(tmp_path: Path) -> None:
    for found in values(run_ranks(compare, 2, str(tmp_path), ASKED, timeout_s=120 + 30 * STEPS)):
        for (case, choices), row in zip(ASKED, found, strict=True):
            for pieces, compared in zip(choices, row, strict=True):
                what = f"{case} {pieces}"
                assert compared.loss <= 1e-5, what
                assert compared.gradients <= 1e-5, what
                stock, mine = compared.head_gathers
                assert mine <= stock, f"{what}: the pass has spoilt DeepSpeed's memory of when to release weights"
                assert compared.head_reductions[0] == compared.head_reductions[1], what


def compare_with_a_given_reference(folder: str) -> Any:
    """Also: elements of this rank's partitions before and after the reference was freed."""
    import gc

    import torch
    from safetensors.torch import load_file, save_file

    from dpofit.train.longdpo import reference_model
    from tests.longdpo.runs import make_model
    from tests.longdpo.zero3 import compare_all

    given = make_model(Case(), Path(folder) / f"given-{os.environ['RANK']}")
    weights = {name: one * 0.5 for name, one in load_file(given / "model.safetensors").items()}
    save_file(weights, given / "model.safetensors", {"format": "pt"})
    stock, elements = reference_model._freed, []

    def partitions() -> int:
        found = [one for one in gc.get_objects() if isinstance(one, torch.nn.Parameter)]
        return sum(one.ds_tensor.numel() for one in found if hasattr(one, "ds_tensor"))

    def freed(trainer: Any, model: Any) -> None:
        elements.append(partitions())
        stock(trainer, model)
        elements.append(partitions())

    reference_model._freed = freed
    case = Case(batch=2, steps=STEPS, extra=(("ref_model", str(given)),))
    return compare_all(folder, [(case, [("cached_reference",)])]), elements


@pytest.mark.skipif(not ALL, reason="DPOFIT_TEST_ALL")
def test_a_given_reference_gives_its_memory_back(tmp_path: Path) -> None:
    for ((compared,),), (before, after) in values(run_ranks(compare_with_a_given_reference, 2, str(tmp_path))):
        assert abs(compared.first_loss - 0.6931) > 1e-4, "this reference must be another one for the test to tell"
        assert max(compared.loss, compared.gradients) <= 1e-5
        assert before - after == before // 4 > 0  # stock's policy and reference are still there, and the policy
