"""Each finding is about the rows it should be about, and silent on sound data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from .helpers import check, finding, ids, pair, sentence, write_rows

SOUND = [pair(n) for n in range(120)]
DECLARED = {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}


def declare(folder: Path, name: str = "d", file_name: str = "d.jsonl", **entry) -> None:
    path = folder / "dataset_info.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, name: {"file_name": file_name, **DECLARED, **entry}}))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    declare(tmp_path)
    return tmp_path / "d.jsonl"


def places(result, check_id: str) -> list[str]:
    return [evidence.where for evidence in finding(result, check_id).evidence]


def test_sound_data_has_only_the_hint_that_answers_are_no_edits(data: Path):
    # unrelated answers are what the generator writes, so that hint is right; lengths are estimated without a model
    assert ids(check(write_rows(data, SOUND))) == {"chosen-not-an-edit", "lengths-estimated"}


def test_exact_counts_need_a_model_folder_and_say_so(data: Path, model_folder: Path):
    write_rows(data, SOUND)
    assert "lengths-estimated" in ids(check(data, "template=qwen"))
    exact = check(data, "template=qwen", f"model_name_or_path={model_folder}")
    assert "lengths-estimated" not in ids(exact)
    assert exact.counter.basis.startswith("exact: ")


def test_what_is_said_of_estimated_lengths_is_not_called_certain(data: Path, model_folder: Path):
    write_rows(data, [*SOUND, pair(300, prompt_words=900)])
    options = ("template=qwen", "cutoff_len=500")
    estimated = finding(check(data, *options), "cutoff-prompt")
    exact = finding(check(data, *options, f"model_name_or_path={model_folder}"), "cutoff-prompt")
    assert (estimated.confidence, exact.confidence) == ("likely", "certain")


def test_an_exact_repeat_is_a_duplicate_whatever_its_case_and_spaces(data: Path):
    again = {**SOUND[5], "chosen": "  " + SOUND[5]["chosen"].upper()}
    found = finding(check(write_rows(data, [*SOUND, again])), "duplicate-pairs")
    assert [(e.where, e.text) for e in found.evidence] == [("d.jsonl:121", "repeats d.jsonl:6")]


def test_a_over_b_and_b_over_a_contradict(data: Path):
    reverse = {**SOUND[7], "chosen": SOUND[7]["rejected"], "rejected": SOUND[7]["chosen"]}
    assert places(check(write_rows(data, [*SOUND, reverse])), "contradictions") == ["d.jsonl:8", "d.jsonl:121"]


def test_two_pairs_of_one_prompt_that_agree_do_not_contradict(data: Path):
    other = {**SOUND[7], "rejected": "something else entirely"}
    assert "contradictions" not in ids(check(write_rows(data, [*SOUND, other])))


def test_a_prompt_with_one_word_changed_is_a_near_copy(data: Path):
    long = pair(500, prompt_words=80)
    words = long["instruction"].split()
    near = {**pair(501), "instruction": " ".join([*words[:40], "otherwise", *words[41:]])}
    found = finding(check(write_rows(data, [*SOUND, long, near])), "near-duplicates")
    assert {evidence.where for evidence in found.evidence} == {"d.jsonl:121", "d.jsonl:122"}


def test_a_shared_system_message_or_preamble_makes_no_near_copies(data: Path):
    declare(data.parent, columns={**DECLARED["columns"], "system": "system"})
    preamble = sentence("preamble", 2000)
    rows = [{**pair(n), "system": preamble, "instruction": f"{preamble} {sentence(n, 400)}"} for n in range(120)]
    assert "near-duplicates" not in ids(check(write_rows(data, rows)))


def test_prompts_of_the_evaluation_set_are_found_in_the_training_set(data: Path):
    write_rows(data.with_name("e.jsonl"), [{**pair(900), "instruction": SOUND[3]["instruction"].upper()}])
    declare(data.parent, "e", "e.jsonl")
    write_rows(data, SOUND)
    result = check("d", f"dataset_dir={data.parent}", "eval_dataset=e")
    assert places(result, "eval-leak") == ["d.jsonl:4"]


def test_val_size_leaks_when_prompts_repeat(data: Path):
    """Two pairs a prompt, half held out: a held-out row's twin is in training half of the time."""
    twins = [{**pair(n), "instruction": SOUND[n // 2]["instruction"]} for n in range(200)]
    write_rows(data, twins)
    assert "about 50% of" in finding(check(data, "val_size=0.5"), "val-split-leak").title
    assert "val-split-leak" not in ids(check(data))


def test_val_size_does_not_leak_when_every_prompt_is_its_own(data: Path):
    assert "val-split-leak" not in ids(check(write_rows(data, SOUND), "val_size=0.5"))


def test_longer_chosen_answers_are_a_length_bias(data: Path):
    rows = [{**pair(n), "chosen": sentence(f"c{n}", 15 + (5 if n % 10 < 8 else -5))} for n in range(300)]
    assert "80% of the pairs" in finding(check(write_rows(data, rows)), "length-bias").title


def test_balanced_lengths_are_not(data: Path):
    rows = [{**pair(n), "chosen": sentence(f"c{n}", 15 + (5 if n % 2 else -5))} for n in range(300)]
    assert "length-bias" not in ids(check(write_rows(data, rows)))


def test_a_turn_of_phrase_on_one_side_makes_the_sides_separable(data: Path):
    rows = [{**pair(n), "rejected": f"As an AI model, {sentence(f'r{n}', 15)}"} for n in range(300)]
    found = finding(check(write_rows(data, rows)), "style-separable")
    assert {"ai", "model"} <= set(next(e.text for e in found.evidence if e.where == "words of rejected").split())


def test_edits_of_the_rejected_answer_are_recognised(data: Path):
    choose = random.Random(0)
    rows = []
    for n in range(200):
        row = pair(n, answer_words=30)
        words = row["rejected"].split()
        for _ in range(10):
            words[choose.randrange(30)] = choose.choice(sentence(n, 50).split())
        rows.append({**row, "chosen": " ".join(words)})
    assert not {"chosen-not-an-edit", "tiny-edits"} & ids(check(write_rows(data, rows)))


def test_edits_of_one_word_are_tiny(data: Path):
    rows = [{**(row := pair(n, answer_words=60)), "chosen": row["rejected"] + " indeed"} for n in range(100)]
    assert "tiny-edits" in ids(check(write_rows(data, rows)))


def test_rejected_answers_the_policy_would_not_write(data: Path, tmp_path: Path):
    write_rows(data, SOUND)
    off = write_rows(tmp_path / "l.jsonl", [{"row": n, "chosen": -20.0, "rejected": -60.0} for n in range(1, 121)])
    on = write_rows(tmp_path / "m.jsonl", [{"row": n, "chosen": -60.0, "rejected": -20.0} for n in range(1, 121)])
    assert "in 100% of the pairs" in finding(check(data, logps=off), "rejected-off-policy").title
    assert "rejected-off-policy" not in ids(check(data, logps=on))


def test_three_long_rows_among_many_are_the_outliers(data: Path):
    rows = [pair(n) for n in range(600)]
    for n in (10, 20, 30):
        rows[n] = pair(n, prompt_words=200)
    found = finding(check(write_rows(data, rows)), "length-outliers")
    assert found.title.startswith("3 of 600 pairs need ")
    assert {e.where for e in found.evidence[:3]} == {"d.jsonl:11", "d.jsonl:21", "d.jsonl:31"}


def test_a_smooth_spread_has_no_outliers(data: Path):
    rows = [pair(n, prompt_words=10 + n // 4) for n in range(600)]
    assert "length-outliers" not in ids(check(write_rows(data, rows)))


def test_answers_over_1024_tokens_are_named_longest_first(data: Path, model_folder: Path):
    rows = [
        *SOUND,
        {**pair(300), "rejected": "z" * 1100},
        {**pair(301), "chosen": "z" * 1200},
        {**pair(302), "chosen": "z" * 900},
    ]
    result = check(write_rows(data, rows), "template=qwen", f"model_name_or_path={model_folder}")
    assert places(result, "answers-over-1k") == ["d.jsonl:122", "d.jsonl:121"]


@pytest.mark.parametrize(
    ("change", "check_id"),
    [
        ({"chosen": ""}, "empty-answer"),
        ({"rejected": " \n"}, "empty-answer"),
        ({"instruction": ""}, "empty-prompt"),
        ({"chosen": "same", "rejected": "same"}, "identical-answers"),
        ({"chosen": SOUND[1]["instruction"] + " and my answer"}, "prompt-in-answer"),
        ({"chosen": "ends here<|im_end|> or not"}, "special-tokens"),
        ({"chosen": "cafÃ© au lait"}, "broken-encoding"),
        ({"rejected": "a hole \ufffd in the text"}, "broken-encoding"),
    ],
)
def test_odd_pairs_are_named_by_row(data: Path, change: dict[str, str], check_id: str):
    rows = [dict(row) for row in SOUND]
    rows[1] |= change
    assert places(check(write_rows(data, rows), "template=qwen"), check_id) == ["d.jsonl:2"]


def test_accents_and_angle_brackets_are_not_odd(data: Path):
    rows = [{**SOUND[0], "chosen": "Ça, c'est très à propos — naïve: São Paulo, Ångström ≤ 3 <b>x</b>"}, *SOUND[1:]]
    found = ids(check(write_rows(data, rows), "template=qwen"))
    assert not {"broken-encoding", "special-tokens"} & found


def test_a_misspelt_column_name_is_said(data: Path):
    declare(data.parent, columns={**DECLARED["columns"], "qury": "input"})
    assert "columns.qury" in finding(check(write_rows(data, SOUND)), "info-unknown-key").title


def test_kto_rows_are_no_pairs(data: Path):
    declare(data.parent, columns={**DECLARED["columns"], "response": "output", "kto_tag": "label"})
    rows = [{**row, "output": "x", "label": True} for row in SOUND]
    assert finding(check(write_rows(data, rows)), "kto-rows").severity == "error"
