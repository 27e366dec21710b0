"""The pieces change nothing that training computes: losses, log-probs and gradients are stock's."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.longdpo.conftest import AssertSame
from tests.longdpo.runs import ASSETS, LOSSES, SAME, Case, Seen, bf16_errors, errors, run, times_further, together

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("the_stack_is_no_garbage")]

LOGPS, PROMPT, BOTH = ("answer_logps",), ("shared_prompt",), ("answer_logps", "shared_prompt")
FIVE = together(Case())
HEADS = [("full", "own"), ("full", "tied"), ("lora", "own"), ("lora", "tied"), ("lora", "trained")]
FAMILIES = ("qwen2", "llama", "mistral", "qwen3")
ALL = bool(os.environ.get("DPOFIT_TEST_ALL"))


def chosen_cases() -> Iterator[Case]:
    """One of each kind of everything; what is not tried together here is tried with DPOFIT_TEST_ALL=1."""
    yield Case()  # 20 steps
    few = functools.partial(Case, steps=5)
    yield few("llama", "lora", "own", loss="ipo", accumulation=2)
    yield few("qwen3", "full", "tied", loss="orpo")
    yield few("mistral", "lora", "trained", loss="ld_alpha")
    yield few("qwen2", "lora", "own", loss="simpo", batch=2, accumulation=2)
    yield few("llama", "full", "own", loss="ftx", batch=2)
    yield few("qwen3", "full", "own", loss="bco", batch=2)


def closely(family: str, head: str) -> bool:
    """Two families with heads of their own are tried with every loss in batches of one and of two pairs."""
    return family in ("qwen2", "llama") and head == "own"


def all_cases() -> Iterator[Case]:
    """Beside what is looked at closely every family, full and LoRA, with every loss: the other heads in turn. Batch and
    accumulation are in turn throughout."""
    sizes = [(1, 1), (2, 2), (1, 2), (2, 1)]
    for (at_family, family), (at_loss, loss) in itertools.product(enumerate(FAMILIES), enumerate(LOSSES)):
        for at_head, (tuning, head) in enumerate(HEADS):
            others = [one for one in HEADS if one[0] == tuning and not closely(family, one[1])]
            if not closely(family, head) and others[(at_family + at_loss) % len(others)] != (tuning, head):
                continue
            first = at_family + at_head + at_loss
            for size in range(first, first + 1 + closely(family, head)):
                batch, accumulation = sizes[size % len(sizes)]
                yield Case(family, tuning, head, loss=loss, batch=batch, accumulation=accumulation)
    # Rounding grows in these: Adam's epsilon was too small for them once (runs.settings).
    yield Case(tuning="lora", head="tied", loss="hinge")
    yield Case(tuning="lora", head="tied", loss="kto_pair", accumulation=2)


def cases(everything: bool = ALL) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Of every case the two pieces that know of heads and losses alone, and all that it can have together; of the two
    families looked at closely, in batches of two pairs, each piece alone."""
    for case in all_cases() if everything else chosen_cases():
        every = together(case)
        each = every if everything and case.batch == 2 and closely(case.family, case.head) else (*LOGPS, *PROMPT)
        yield from ((case, (piece,)) for piece in each if piece in every)
        yield case, every


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("longdpo")


@functools.lru_cache(maxsize=4)  # cases come in order; gradients of many runs would fill the memory
def stock_run(case: Case, folder: Path) -> Seen:
    return run(case, (), folder)


@pytest.mark.parametrize(
    ("case", "pieces"), list(cases()), ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value)
)
def test_dpo_is_the_same(case: Case, pieces: tuple[str, ...], folder: Path, assert_same: AssertSame) -> None:
    stock, long = stock_run(case, folder), run(case, pieces, folder)
    assert len(long.losses) == len(long.logps) == case.steps * case.accumulation
    assert_same({(case, pieces): errors(stock, long)})


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_an_epoch_whose_last_step_has_fewer_batches_is_the_same(
    tuning: str, folder: Path, assert_same: AssertSame
) -> None:
    """24 pairs in steps of five: the fifth step has four, and the sixth begins anew."""
    case = Case(tuning=tuning, accumulation=5, steps=6)
    stock, long = run(case, (), folder), run(case, together(case), folder)
    assert len(stock.losses) == 5 * 4 + 4 + 5
    assert_same({(case, together(case)): errors(stock, long)})


@pytest.mark.parametrize("pieces", [(), LOGPS, PROMPT, FIVE], ids="+".join)
def test_the_first_loss_is_ln_2(pieces: tuple[str, ...], folder: Path) -> None:
    first = run(replace(Case(), steps=1), pieces, folder).losses[0]
    assert math.isclose(first, math.log(2), rel_tol=1e-6)


@pytest.mark.parametrize("stage", ["kto", "sft"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_other_stages_are_the_same(stage: str, tuning: str, folder: Path, assert_same: AssertSame) -> None:
    case = Case(tuning=tuning, stage=stage, batch=2, accumulation=2, steps=20 if ALL else 4)
    stock = run(case, (), folder)
    for pieces in (LOGPS, together(case)):
        long = run(case, pieces, folder)
        assert_same({(case, pieces): errors(stock, long)})
        for one, other in zip(stock.metrics, long.metrics, strict=True):
            assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_kto_of_unequal_numbers_is_the_same(tmp_path: Path, assert_same: AssertSame) -> None:
    """Seven wanted answers and two unwanted, three a batch: some batches hold one kind only. The mismatched prompts and
    answers that the divergence is estimated from are rows of their own, cached too; one is at once an example."""
    answers = [f"It is {number}." for number in range(1, 8)] + ["No.", "Never."]
    rows = [
        {"instruction": f"Name number {number}, please.", "output": answer, "label": number < 7}
        for number, answer in enumerate(answers)
    ]
    rows[1]["instruction"] = rows[2]["instruction"]  # so example 1 is what mismatching makes of example 2
    described = json.loads((ASSETS / "dataset_info.json").read_text())["smoke_labelled"]
    (tmp_path / "unequal.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"unequal": {**described, "file_name": "unequal.json"}}))
    case = Case(stage="kto", batch=3, steps=6, extra=(("dataset_dir", str(tmp_path)), ("dataset", "unequal")))
    stock, long = run(case, (), tmp_path), run(case, together(case), tmp_path)
    unwanted = {"rewards/rejected" in metrics for metrics in stock.metrics if "loss" in metrics}
    assert unwanted == {True, False}, "some batches have an unwanted answer, some have none"
    assert_same({(case, together(case)): errors(stock, long)})


def test_evaluation_is_the_same(folder: Path) -> None:
    evaluates = (("val_size", 0.2), ("eval_strategy", "steps"), ("eval_steps", 2), ("per_device_eval_batch_size", 1))
    case = Case(steps=2, extra=evaluates)
    stock = [metrics for metrics in run(case, (), folder).metrics if "eval_loss" in metrics]
    for pieces in (LOGPS, BOTH):
        long = [metrics for metrics in run(case, pieces, folder).metrics if "eval_loss" in metrics]
        assert len(long) == len(stock) > 0
        assert long[0]["eval_loss"] == pytest.approx(stock[0]["eval_loss"], rel=SAME)
        assert long[0]["eval_logps/rejected"] == pytest.approx(stock[0]["eval_logps/rejected"], rel=SAME)


def test_answer_logps_keeps_the_meaning_of_every_metric(folder: Path) -> None:
    case = Case(batch=2, steps=3)
    for one, other in zip(stock_run(case, folder).metrics, run(case, LOGPS, folder).metrics, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)
        assert "train_loss" in one or "logits/chosen" in one


def test_shared_prompt_names_its_mean_of_logits_differently(folder: Path) -> None:
    """Stock's is over padding too. Where a pair has no padding the two are the same number."""
    case = Case(steps=12)
    stock = [metrics for metrics in stock_run(case, folder).metrics if "loss" in metrics]
    alone, both = (
        [metrics for metrics in run(case, pieces, folder).metrics if "loss" in metrics] for pieces in (PROMPT, BOTH)
    )
    for metrics in (*alone, *both):
        assert "logits/chosen" not in metrics
    for one, other in zip(alone, both, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)
    gaps = [abs(a["logits/chosen"] - b["logits/chosen_unpadded"]) for a, b in zip(stock, alone, strict=True)]
    assert min(gaps) < 1e-6
    assert max(gaps) > 1e-4


@functools.cache
def rounded(pieces: tuple[str, ...], dtype: str, folder: Path) -> tuple[list[float], list[float]]:
    """How far bf16 is from stock's fp32, at weights that stay where they are, so that steps are independent."""
    still = Case(steps=24, extra=(("learning_rate", 0.0),))
    return bf16_errors(stock_run(still, folder), run(replace(still, dtype=dtype), pieces, folder))


@pytest.mark.parametrize("dtype", ["bf16", "pure_bf16"])
def test_bf16_is_no_further_from_fp32_than_stocks(dtype: str, folder: Path) -> None:
    stock = rounded((), dtype, folder)
    assert min(stock[1]) > 1e-3  # the run was in bf16
    for pieces in (LOGPS, BOTH, FIVE):
        for theirs, mine in zip(stock, rounded(pieces, dtype, folder), strict=True):
            least, most = times_further(theirs, mine)
            assert least <= 1.0005, f"{pieces}: further off"
            if pieces == LOGPS:  # the same products
                assert most <= 1.0005
            else:  # products of other shapes, so other roundings, as large on average; all steps' errors together
                assert sum(error**2 for error in mine) < 1.1**2 * sum(error**2 for error in theirs)


def test_the_comparison_sees_one_rounding_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of the shared row to bf16's precision once more, and off by half of its last place."""
    import torch

    from dpofit.train.longdpo import shared_prompt

    def rounded_again(row: object, hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(0)) - 0.5
        return parted(row, (hidden * (1 + noise * 2**-6)).to(hidden.dtype))  # type: ignore[arg-type]

    parted = shared_prompt.parted
    monkeypatch.setattr(shared_prompt, "parted", rounded_again)
    still = Case(steps=24, extra=(("learning_rate", 0.0),))
    errors = bf16_errors(stock_run(still, folder), run(replace(still, dtype="pure_bf16"), PROMPT, folder))
    assert times_further(rounded((), "pure_bf16", folder)[1], errors[1])[0] > 1.0005
