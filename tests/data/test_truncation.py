"""What cutoff_len takes from a pair is what LLaMA-Factory's own functions take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

from dpofit.data.check import cut_marks
from dpofit.data.convert import Message, Pair
from dpofit.data.tokens import counter_for
from dpofit.data.truncate import Lengths, infer_seqlen, truncated

lengths = st.integers(0, 5000)


@pytest.mark.stack
@settings(max_examples=2000, deadline=None)
@given(lengths, lengths, st.integers(1, 5000))
def test_infer_seqlen_is_the_real_one(source: int, target: int, cutoff: int):
    real = pytest.importorskip("llamafactory.data.processor.processor_utils").infer_seqlen
    assert infer_seqlen(source, target, cutoff) == real(source, target, cutoff)


def test_a_short_answer_costs_the_prompt_its_tail():
    assert truncated(Lengths(3000, 400, 300), 2048) == Lengths(1648, 400, 300)


def test_a_short_prompt_costs_the_longer_answer_its_tail():
    assert truncated(Lengths(500, 3000, 1000), 2048) == Lengths(500, 1548, 1000)


def test_two_long_halves_share_the_cut():
    # int(2048 * 3000 / 6000) = 1024 for the answers, the rest for the prompt
    assert truncated(Lengths(3000, 3000, 1200), 2048) == Lengths(1024, 1024, 1024)


def answers(chosen: str, rejected: str, prompt: str = "short question") -> Pair:
    return Pair(
        (Message("user", prompt),), Message("assistant", chosen), Message("assistant", rejected), "", "", (0, 0, 0)
    )


def marks(pair: Pair, cutoff: int, model_folder: Path) -> list[str]:
    from dpofit.data.templates import Thinking

    counter, why = counter_for("qwen", model_folder, Thinking(), "")
    assert why == ""
    return list(cut_marks(counter.measure([pair], cutoff)[0]))


def test_nothing_is_said_of_a_pair_that_fits(model_folder: Path):
    assert marks(answers("yes", "no"), 2048, model_folder) == []


def test_only_the_longer_answer_loses_its_end_token(model_folder: Path):
    assert marks(answers("x" * 900, "no"), 256, model_folder) == ["cutoff-one-eos"]


def test_both_answers_lose_it_and_stay_different(model_folder: Path):
    assert marks(answers("x" * 900, "y" * 900), 256, model_folder) == ["cutoff-eos"]


def test_answers_that_differ_in_the_tail_become_identical(model_folder: Path):
    same = "x" * 900
    assert marks(answers(same + "yes", same + "no"), 256, model_folder) == ["cutoff-eos", "cutoff-identical"]


def test_a_cut_prompt_loses_the_assistant_header(model_folder: Path):
    assert marks(answers("yes", "no", "q " * 500), 256, model_folder) == ["cutoff-prompt"]


def test_losing_only_the_line_break_after_the_end_token_is_no_loss(model_folder: Path):
    """qwen ends an answer with <|im_end|> and a line break; a cut of one token takes the break alone."""
    pair = answers("x" * 300, "no")
    from dpofit.data.templates import Thinking

    counter, _ = counter_for("qwen", model_folder, Thinking(), "")
    full = counter.measure([pair], None)[0].lengths
    measured = counter.measure([pair], full.row - 1)[0]
    assert measured.kept.chosen == full.chosen - 1
    assert list(cut_marks(measured)) == []
    assert list(cut_marks(counter.measure([pair], full.row - 2)[0])) == ["cutoff-one-eos"]


@pytest.mark.stack
def test_the_pairwise_processor_cuts_the_same_tokens(model_folder: Path, tmp_path: Path):
    """Real PairwiseDatasetProcessor, on pairs that hit every branch of the cut."""
    pytest.importorskip("llamafactory")
    import json

    from dpofit.data.templates import Thinking

    from .real import train_rows

    pairs = [
        answers("yes", "no", "q " * 300),
        answers("x" * 500, "no"),
        answers("x" * 500, "y" * 400, "q " * 300),
        answers("x" * 300 + "a", "x" * 300 + "b"),
        answers("fits", "as well"),
    ]
    rows = [{"p": p.prompt[0].content, "c": p.chosen.content, "r": p.rejected.content} for p in pairs]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    info = {"file_name": "d.json", "ranking": True, "columns": {"prompt": "p", "chosen": "c", "rejected": "r"}}
    counter, _ = counter_for("qwen", model_folder, Thinking(), None)
    for cutoff in (64, 200, 301, 640):
        real = train_rows(tmp_path, info, model_folder, cutoff_len=cutoff)
        assert not real.error
        for row, measured in zip(real.rows, counter.measure(pairs, cutoff), strict=True):
            kept = measured.kept
            assert sum(label == -100 for label in row["chosen_labels"]) == kept.prompt
            assert len(row["chosen_input_ids"]) == kept.prompt + kept.chosen
            assert len(row["rejected_input_ids"]) == kept.prompt + kept.rejected
            assert (row["chosen_input_ids"] == row["rejected_input_ids"]) == measured.made_identical
            eos = 5  # <|im_end|>, fifth of the special tokens of the tokenizer made in conftest
            assert (eos not in row["chosen_labels"]) == measured.chosen_loses_eos
            assert (eos not in row["rejected_labels"]) == measured.rejected_loses_eos
