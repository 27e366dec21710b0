"""The suggested dataset_info.json entry gives pairs, and says when no entry can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpofit.data.fix import FixPlan
from dpofit.data.suggest import suggest

from .helpers import check, finding, write_rows

H, G = {"from": "human", "value": "q"}, {"from": "gpt", "value": "x"}
U, A, B = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "x"), ("assistant", "y")))


@pytest.mark.parametrize(
    ("row", "columns", "tags"),
    [
        (
            {"prompt": "q", "chosen": "x", "rejected": "y"},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
            None,
        ),
        (
            {"question": "q", "system": "s", "response_j": "x", "response_k": "y"},
            {"prompt": "question", "system": "system", "chosen": "response_j", "rejected": "response_k"},
            None,
        ),
        (
            {"instruction": "q", "input": "i", "history": [["a", "b"]], "chosen": "x", "rejected": "y"},
            {
                "prompt": "instruction",
                "query": "input",
                "history": "history",
                "chosen": "chosen",
                "rejected": "rejected",
            },
            None,
        ),
        (
            {"messages": [U], "chosen": A, "rejected": B},
            {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
            {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        ),
    ],
)
def test_a_mapping_is_found(row, columns, tags):
    found = suggest([row])
    assert found is not None and not found.rewrites and (found.pairs, found.rows) == (1, 1)
    entry = found.spec.entry("f.json")
    assert entry["columns"] == columns and entry["ranking"] is True
    assert tags is None or tags.items() <= entry["tags"].items()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": [U, A], "rejected": [U, B]},  # Hugging Face "implicit prompt" conversations
        {"conversations": [H], "chosen": "x", "rejected": "y"},  # sharegpt prompt, text answers
        {"prompt": [U], "chosen": [A], "rejected": [B]},  # TRL conversational
        {"instruction": "q", "output": ["x", "y"]},  # LLaMA-Factory's own format of 2023
    ],
)
def test_rows_that_no_mapping_can_express_can_be_rewritten(row):
    found = suggest([row])
    assert found is not None and found.rewrites and found.pairs == 1


def test_rows_without_two_answers_get_no_suggestion():
    assert suggest([{"instruction": "q", "output": "x"}, {"messages": [U, A]}]) is None


def test_wrong_tags_are_answered_with_the_entry_that_works(tmp_path: Path):
    """QwenLM/Qwen3#1314: data says human and gpt, dataset_info.json says user and assistant."""
    rows = [{"conversations": [H], "chosen": G, "rejected": {"from": "gpt", "value": str(n)}} for n in range(3)]
    write_rows(tmp_path / "d.jsonl", rows)
    entry = {"file_name": "d.jsonl", "formatting": "sharegpt", "ranking": True}
    entry["columns"] = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    entry["tags"] = {"role_tag": "from", "content_tag": "value", "user_tag": "user", "assistant_tag": "assistant"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": entry}))
    found = finding(check(tmp_path / "d.jsonl"), "role-tags")
    assert found.rows == 3 and "'human'" in found.evidence[0].text
    fixed = json.loads(found.fix.split(": ", 1)[1])
    (tmp_path / "dataset_info.json").write_text(json.dumps(fixed))
    assert check(tmp_path / "d.jsonl").run.pairs == 3


def test_a_file_that_nothing_declares_and_nobody_can_read_gets_one_finding(tmp_path: Path):
    (tmp_path / "semi.csv").write_text("instruction;chosen;rejected\na;b;c\n")
    [found] = check(tmp_path / "semi.csv").findings
    assert (found.id, found.severity) == ("data.format-unknown", "error")
    assert found.evidence[0].text == "rows have: instruction;chosen;rejected"


def test_undeclared_rows_that_must_be_rewritten_are_pointed_to_fix(tmp_path: Path):
    write_rows(tmp_path / "trl.jsonl", [{"prompt": [U], "chosen": [A], "rejected": [B]}])
    [found] = check(tmp_path / "trl.jsonl").findings
    assert found.id == "data.format-unknown" and "dpofit data … --fix OUT" in found.fix
    check(tmp_path / "trl.jsonl", fix=(tmp_path / "out", FixPlan()))
    [row] = map(json.loads, (tmp_path / "out" / "pairs.jsonl").read_text().splitlines())
    assert (row["conversations"], row["chosen"]["value"], row["rejected"]["value"]) == ([H], "x", "y")
