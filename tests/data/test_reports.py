"""Public reports of runs that data broke, rebuilt from what they say: each is found before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

from .helpers import check, finding, ids, pair, write_rows


def declared(folder: Path, rows, **entry) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.jsonl", **entry}}))
    return write_rows(folder / "d.jsonl", rows)


COLUMNS = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}


def test_llamafactory_1829_no_ranking_flag_and_answers_in_one_list(tmp_path: Path):
    """hiyouga/LlamaFactory#1829: first no `ranking`, then the wrong answer format."""
    rows = [{"instruction": "q", "output": ["good", "bad"]} for _ in range(3)]
    result = check(declared(tmp_path, rows))
    assert {"not-ranked", "no-usable-rows"} <= ids(result)
    assert "can be rewritten into pairs" in finding(result, "no-usable-rows").fix


def test_nlsr_2_dpo_on_a_set_that_is_not_ranked(tmp_path: Path):
    """xinykou/NLSR#2: "The dataset is not applicable in the current training stage"."""
    result = check(declared(tmp_path, [pair(n) for n in range(3)], columns=COLUMNS))
    assert "The dataset is not applicable in the current training stage" in finding(result, "not-ranked").cause


def test_qwen3_1314_tags_that_are_not_those_of_the_data(tmp_path: Path):
    """QwenLM/Qwen3#1314: data says human and gpt, dataset_info.json says user and assistant."""
    message = {"from": "human", "value": "q"}
    rows = [
        {"conversations": [message], "chosen": {"from": "gpt", "value": a}, "rejected": {"from": "gpt", "value": "n"}}
        for a in "xyz"
    ]
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "user", "assistant_tag": "assistant"}
    result = check(declared(tmp_path, rows, formatting="sharegpt", ranking=True, columns=columns, tags=tags))
    assert "where 'user' belongs" in finding(result, "role-tags").evidence[0].text
    assert "gives pairs from 3 of the first 3 rows" in finding(result, "role-tags").fix


def test_llamafactory_7696_images_with_the_wrong_number_of_marks(tmp_path: Path):
    """hiyouga/LlamaFactory#7696: sharegpt pairs with images; the map worker dies (its cause is not in the report)."""
    row = {
        "conversations": [{"from": "human", "value": "what is this"}],
        "chosen": {"from": "gpt", "value": "a cat"},
        "rejected": {"from": "gpt", "value": "a dog"},
        "images": ["cat.png"],
    }
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "images": "images"}
    data = declared(tmp_path, [row], formatting="sharegpt", ranking=True, columns=columns)
    assert finding(check(data, "template=qwen2_vl"), "media-mismatch").severity == "error"
    assert finding(check(data, "template=qwen"), "media-unsupported").severity == "error"
    row["conversations"][0]["value"] = "<image>what is this"
    write_rows(data, [row])
    assert "media-mismatch" not in ids(check(data, "template=qwen2_vl"))


def test_llamafactory_1913_more_than_two_ranked_answers(tmp_path: Path):
    """hiyouga/LlamaFactory#1913: a row cannot hold a ranking of more than two answers."""
    rows = [{**pair(n), "rejected": ["bad", "worse"]} for n in range(3)]
    result = check(declared(tmp_path, rows, ranking=True, columns=COLUMNS))
    assert "rejected is a list" in finding(result, "answer-shape").evidence[0].text


def test_llamafactory_2870_the_chosen_answer_loses_its_end_the_rejected_one_keeps_it(
    tmp_path: Path, model_folder: Path
):
    """hiyouga/LlamaFactory#2870, Qwen1.5 with cutoff_len 8192 there."""
    rows = [{**pair(n), "chosen": "z" * 400} for n in range(3)]
    data = declared(tmp_path, rows, ranking=True, columns=COLUMNS)
    result = check(data, "template=qwen", f"model_name_or_path={model_folder}", "cutoff_len=300")
    assert finding(result, "cutoff-one-eos").rows == 3


def test_llamafactory_4617_both_answers_stay_within_the_cutoff(tmp_path: Path, model_folder: Path):
    """hiyouga/LlamaFactory#4617, fixed in mid-2024: the rejected answer ran over cutoff_len. Not in 0.9.5."""
    rows = [{**pair(n), "rejected": "z" * 4000} for n in range(3)]
    data = declared(tmp_path, rows, ranking=True, columns=COLUMNS)
    result = check(data, "template=qwen", f"model_name_or_path={model_folder}", "cutoff_len=2048")
    assert int(result.run.lengths.row.max()) == 2048
