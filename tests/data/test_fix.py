"""--fix writes the usable pairs as a data set that trains, and leaves the input alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpofit.data.fix import FixPlan

from .helpers import check, dpofit, pair, sentence, write_rows

INFO = {"file_name": "d.jsonl", "ranking": True}
INFO["columns"] = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}


def fix(path: Path, out: Path, *overrides: str, **plan):
    result = check(path, *overrides, fix=(out, FixPlan(**plan)))
    rows = [json.loads(line) for line in (out / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    return result.fixed, rows


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": INFO}))
    return tmp_path / "d.jsonl"


def prompts(rows) -> list[str]:
    return [row["conversations"][-1]["value"] for row in rows]


def test_unusable_repeated_and_contradictory_rows_are_left_out_and_counted(data: Path, tmp_path: Path):
    rows = [pair(n) for n in range(10)]
    rows[1]["chosen"] = ""
    rows[2]["chosen"] = None
    rows[4] = dict(rows[3])
    rows[6] = {**rows[5], "chosen": rows[5]["rejected"], "rejected": rows[5]["chosen"]}
    done, written = fix(write_rows(data, rows), tmp_path / "out", order="keep")
    assert done.left_out == {
        "data.empty-answer": 1,
        "data.answer-missing": 1,
        "data.duplicate-pairs": 1,
        "data.contradictions": 2,
    }
    assert prompts(written) == [rows[n]["instruction"] for n in (0, 3, 7, 8, 9)]
    assert (done.rows_read, done.pairs_written) == (10, 5)


def test_the_input_is_not_touched(data: Path, tmp_path: Path):
    write_rows(data, [pair(n) for n in range(10)])
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    fix(data, tmp_path / "out")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before


def test_shuffling_is_by_seed(data: Path, tmp_path: Path):
    write_rows(data, [pair(n) for n in range(50)])
    orders = [prompts(fix(data, tmp_path / f"o{n}", seed=seed)[1]) for n, seed in enumerate((1, 1, 2))]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) and len(orders[0]) == 50


def test_longest_first_says_that_the_trainer_must_not_shuffle(data: Path, tmp_path: Path):
    write_rows(data, [pair(n, prompt_words=5 + 7 * n % 50) for n in range(40)])
    done, written = fix(data, tmp_path / "out", order="longest-first")
    lengths = [len(text) for text in prompts(written)]
    assert lengths[0] > 2 * lengths[-1]
    assert done.train_with["disable_shuffling"] is True


def test_rows_over_the_cutoff_are_dropped(data: Path, tmp_path: Path, model_folder: Path):
    model = ("template=qwen", f"model_name_or_path={model_folder}", "cutoff_len=400")
    rows = [pair(0), {**pair(1), "instruction": "z" * 500}, {**pair(2), "chosen": "z" * 500}]
    done, written = fix(write_rows(data, rows), tmp_path / "out", *model)
    assert prompts(written) == [rows[0]["instruction"]]
    assert done.left_out == {"over the length limits": 2}


def test_capped_answers_have_exactly_the_tokens_allowed(data: Path, tmp_path: Path, model_folder: Path):
    model = ("template=qwen", f"model_name_or_path={model_folder}")
    rows = [pair(0), {**pair(1), "chosen": "请用中文简要说明 " + "z" * 300}]
    done, written = fix(
        write_rows(data, rows), tmp_path / "out", *model, outliers="cap", max_response=120, order="keep"
    )
    assert done.answers_capped == 1 and done.pairs_written == 2
    assert rows[1]["chosen"].startswith(written[1]["chosen"]["value"])
    assert written[1]["rejected"]["value"] == rows[1]["rejected"]
    again = check(tmp_path / "out" / "pairs.jsonl", *model)
    assert int(again.run.lengths.chosen.max()) == 120


def test_rows_no_mapping_can_express_are_rewritten(tmp_path: Path):
    """Hugging Face's conversational preference format, which LLaMA-Factory drops row by row."""
    rows = []
    for n in range(5):
        question = {"role": "user", "content": sentence(n, 8)}
        sides = [[question, {"role": "assistant", "content": sentence(f"{s}{n}", 8)}] for s in "cr"]
        rows.append({"prompt": question["content"], "chosen": sides[0], "rejected": sides[1], "score_chosen": 1})
    done, written = fix(write_rows(tmp_path / "d.jsonl", rows), tmp_path / "out", order="keep")
    assert done.pairs_written == 5
    assert prompts(written) == [sentence(n, 8) for n in range(5)]


def test_a_folder_that_holds_something_needs_force(data: Path, tmp_path: Path):
    write_rows(data, [pair(n) for n in range(5)])
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    refused = dpofit("data", data, "--fix", out)
    assert refused.returncode == 2 and "is not empty" in refused.stderr
    assert dpofit("data", data, "--fix", out, "--force").returncode == 0
    assert (out / "mine.txt").read_text() == "precious"


def test_what_was_written_passes_its_own_check(data: Path, tmp_path: Path):
    rows = [{**pair(n), "system": None, "id": n if n % 2 else str(n)} for n in range(60)]
    rows[3]["rejected"] = rows[3]["chosen"]
    fix(write_rows(data, rows), tmp_path / "out")
    again = check("d_fixed", f"dataset_dir={tmp_path / 'out'}")
    severities = {finding.id: finding.severity for finding in again.findings}
    assert set(severities) <= {"data.lengths-estimated", "data.chosen-not-an-edit"}
    assert again.run.pairs == 59


@pytest.mark.stack
def test_llama_factory_trains_on_what_was_written(data: Path, tmp_path: Path, model_folder: Path):
    """The same token ids as from the sound rows of the input, in the order written."""
    pytest.importorskip("llamafactory")
    from .real import train_rows

    rows = [pair(n) for n in range(20)]
    bad = [{**pair(50), "chosen": None}, {**pair(51), "rejected": pair(51)["chosen"]}]
    write_rows(data, [*rows[:7], *bad, *rows[7:]])
    fix(data, tmp_path / "out", order="longest-first")
    info = json.loads((tmp_path / "out" / "dataset_info.json").read_text())["d_fixed"]
    fixed = train_rows(tmp_path / "out", info, model_folder)
    (tmp_path / "sound").mkdir()
    write_rows(tmp_path / "sound" / "d.jsonl", rows)
    sound = train_rows(tmp_path / "sound", INFO, model_folder)
    assert not fixed.error and not sound.error

    def tokens(outcome):
        return [(row["chosen_input_ids"], row["rejected_input_ids"], row["chosen_labels"]) for row in outcome.rows]

    assert sorted(tokens(fixed)) == sorted(tokens(sound))
