"""All pieces under real DeepSpeed ZeRO-3 and under plain data parallelism, on pairs of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.guard.ranks import run_ranks, values
from tests.longdpo.conftest import AssertSame
from tests.longdpo.runs import Case, together
from tests.longdpo.zero3 import Compared, compare_all

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]

ALL = bool(os.environ.get("DPOFIT_TEST_ALL"))
THREE = ("cached_reference", "tiled_mlp", "offload_checkpoints")
STEPS = 20 if ALL else 3
ALONE = [(one,) for one in THREE] if ALL else []
Asked = list[tuple[Case, list[tuple[str, ...]]]]
# Each rank has six batches of two an epoch: with four a step, the second step has two.
FEWER = Case(batch=2, accumulation=4, steps=STEPS)
FULL, LORA = Case(steps=STEPS), Case(tuning="lora", steps=STEPS)
ZERO3: Asked = [
    (FEWER, [together(FEWER), *ALONE]),  # all but shared_prompt, which wants one pair a batch
    *([(FULL, [together(FULL)])] if ALL else []),
    (LORA, [together(LORA), *ALONE]),
]
PARALLEL: Asked = [
    (Case(accumulation=5, steps=STEPS), [together(LORA), *(((one,) for one in together(LORA)) if ALL else ())]),
    (LORA, [together(LORA)]),
]


def compared(asked: Asked, folder: Path, zero3: bool) -> list[dict[tuple[Case, tuple[str, ...]], Compared]]:
    """Of each rank."""
    return [
        {
            (case, pieces): found
            for (case, choices), row in zip(asked, rows, strict=True)
            for pieces, found in zip(choices, row, strict=True)
        }
        for rows in values(run_ranks(compare_all, 2, str(folder), asked, zero3, timeout_s=120 + 30 * STEPS))
    ]


def test_two_zero3_ranks_train_as_with_stock_code(tmp_path: Path, assert_same: AssertSame) -> None:
    for rank in compared(ZERO3, tmp_path, zero3=True):
        assert_same({what: found.errors for what, found in rank.items()})
        for what, found in rank.items():
            stock, mine = found.head_gathers
            assert mine <= stock, f"{what}: the pass has spoilt DeepSpeed's memory of when to release weights"
            assert found.head_reductions[0] == found.head_reductions[1], what


def test_two_data_parallel_ranks_train_as_with_stock_code(tmp_path: Path, assert_same: AssertSame) -> None:
    """Twelve batches a rank and epoch: with five a step, the third step has two."""
    for rank in compared(PARALLEL, tmp_path, zero3=False):
        assert_same({what: found.errors for what, found in rank.items()})


def compare_with_a_given_reference(folder: str) -> Any:
    """Also: elements of this rank's partitions before and after the reference was freed."""
    import gc

    import torch
    from safetensors.torch import load_file, save_file

    from dpofit.train.longdpo import reference_model
    from tests.longdpo.runs import make_model

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
def test_a_given_reference_gives_its_memory_back(tmp_path: Path, assert_same: AssertSame) -> None:
    for ((found,),), (before, after) in values(run_ranks(compare_with_a_given_reference, 2, str(tmp_path))):
        assert abs(found.first_loss - 0.6931) > 1e-4, "this reference must be another one for the test to tell"
        case = Case(batch=2, steps=STEPS, extra=(("ref_model", "half of every weight"),))
        assert_same({(case, ("cached_reference",)): found.errors})
        assert before - after == before // 4 > 0  # stock's policy and reference are still there, and the policy
