"""Under real DeepSpeed ZeRO-3 on two ranks the pieces are stock too, and the head is handled once a pass."""

from __future__ import annotations

import math
import os

import pytest

from tests.guard.ranks import run_ranks, values
from tests.longdpo.conftest import AssertSame
from tests.longdpo.runs import Case
from tests.longdpo.zero3 import Compared, compare_all

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]

LOGPS, PROMPT, BOTH = ("answer_logps",), ("shared_prompt",), ("answer_logps", "shared_prompt")
Asked = list[tuple[Case, list[tuple[str, ...]]]]

CHOSEN: Asked = [
    (Case(steps=3), [LOGPS, BOTH]),
    (Case("llama", "lora", "trained", loss="ld_alpha", accumulation=2, steps=2), [BOTH]),
    (Case("qwen3", "full", "tied", loss="orpo", batch=2, steps=2), [LOGPS]),
]
# Every pair of (family, tuning with head, loss, batch and accumulation, pieces) at least once between families,
# tunings, batches and pieces; each loss at least once.
DOZEN: Asked = [
    (Case("qwen2", "full", "own", loss="sigmoid"), [LOGPS, PROMPT, BOTH]),
    (Case("llama", "full", "own", loss="ipo", accumulation=2), [BOTH]),
    (Case("mistral", "full", "own", loss="hinge", batch=2), [LOGPS]),
    (Case("qwen3", "full", "own", loss="bco"), [PROMPT]),
    (Case("qwen2", "full", "tied", loss="simpo", accumulation=2), [PROMPT]),
    (Case("llama", "full", "tied", loss="ftx", batch=2), [LOGPS]),
    (Case("mistral", "full", "tied", loss="smoothed"), [BOTH]),
    (Case("qwen3", "full", "tied", loss="orpo", batch=2, accumulation=2), [LOGPS]),
    (Case("qwen2", "lora", "own", loss="kto_pair", batch=2), [LOGPS]),
    (Case("llama", "lora", "own", loss="sigmoid"), [PROMPT]),
    (Case("mistral", "lora", "own", loss="orpo", accumulation=2), [BOTH]),
    (Case("qwen3", "lora", "trained", loss="ld_alpha", accumulation=2), [BOTH]),
    (Case("llama", "lora", "trained", loss="ftx", batch=2), [LOGPS]),
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, tuple[str, ...], Compared]]:
    """Both ranks' findings; one pair of ranks runs everything."""
    asked, folder = (DOZEN if os.environ.get("DPOFIT_TEST_ALL") else CHOSEN), tmp_path_factory.mktemp("zero3")
    ranks = values(run_ranks(compare_all, 2, str(folder), asked, timeout_s=1500))
    return [
        (case, pieces, found)
        for rank in ranks
        for (case, choices), row in zip(asked, rank, strict=True)
        for pieces, found in zip(choices, row, strict=True)
    ]


def test_losses_log_probs_and_gradients_are_stocks(
    compared: list[tuple[Case, tuple[str, ...], Compared]], assert_same: AssertSame
) -> None:
    """What a trained head is compared with is stock code without ZeRO-3, under which it does not start."""
    for rank in (compared[: len(compared) // 2], compared[len(compared) // 2 :]):
        assert_same({(case, pieces): found.errors for case, pieces, found in rank})


def test_the_first_loss_is_ln_2(compared: list[tuple[Case, tuple[str, ...], Compared]]) -> None:
    firsts = [
        found.first_loss * case.accumulation for case, _, found in compared if case.loss in ("sigmoid", "smoothed")
    ]
    assert firsts
    assert all(math.isclose(first, math.log(2), rel_tol=1e-6) for first in firsts)


def test_the_head_is_gathered_once_a_pass_not_once_a_chunk(
    compared: list[tuple[Case, tuple[str, ...], Compared]],
) -> None:
    """Forward and backward, and under adapters the reference's forward, which the same engine makes with the same head.
    A tied head is the embedding as well, which stays from a backward to the next micro-batch. Answers take several
    chunks (runs.py)."""
    for case, pieces, found in compared:
        stock, long = found.head_gathers
        passes = 3 if (case.tuning, case.head) == ("lora", "own") and case.loss not in ("orpo", "simpo") else 2
        tied = 4 * case.accumulation - (case.accumulation - 1)
        assert long == (tied if case.head == "tied" else passes * case.accumulation), f"{case} {pieces}"
        assert case.head == "trained" or stock == long


def test_the_heads_gradient_is_reduced_once(compared: list[tuple[Case, tuple[str, ...], Compared]]) -> None:
    for case, _, found in compared:
        trained = case.tuning == "full" or case.head == "trained"
        assert found.head_reductions[1] == trained * case.accumulation
