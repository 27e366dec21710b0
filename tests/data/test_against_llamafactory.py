"""What dpofit calls fatal, dropped or fine is what LLaMA-Factory's own loading makes of the same files."""

# ruff: noqa: E501 - one case a line

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stack
pytest.importorskip("llamafactory")

from dpofit.data.run import check_data  # noqa: E402
from dpofit.errors import BadInput  # noqa: E402

from .real import train_rows  # noqa: E402

logging.getLogger("datasets").setLevel(logging.CRITICAL)

ALPACA = {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}
SHAREGPT = {
    "formatting": "sharegpt",
    "ranking": True,
    "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
}
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
A: dict[str, Any] = {"instruction": "hi", "chosen": "a", "rejected": "b"}


def human(text: Any) -> dict[str, Any]:
    return {"from": "human", "value": text}


def gpt(text: Any) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


S: dict[str, Any] = {"conversations": [human("hi")], "chosen": gpt("x"), "rejected": gpt("y")}
O = {  # noqa: E741
    "messages": [{"role": "user", "content": "q"}],
    "chosen": {"role": "assistant", "content": "x"},
    "rejected": {"role": "assistant", "content": "y"},
}
O_INFO = {
    "ranking": True,
    "columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
    "tags": TAGS,
}


def with_columns(info: dict[str, Any], **columns: str) -> dict[str, Any]:
    return {**info, "columns": {**info["columns"], **columns}}


@dataclass(frozen=True)
class Case:
    what: str
    content: Any  # rows, text, bytes, or a function that writes the file
    info: dict[str, Any]
    finds: str  # id of the finding that says so, "" for a clean set


ROWS = [  # each is tried as a JSON list and as JSON lines
    Case("good alpaca", [A, {**A, "chosen": "c"}], ALPACA, ""),
    Case("query column missing", [A], with_columns(ALPACA, query="input"), "column-absent"),
    Case("no columns named", [A], {"ranking": True}, "column-absent"),
    Case("no ranking flag", [A], {"columns": ALPACA["columns"]}, "not-ranked"),
    Case("ranking is the text false", [A], {**ALPACA, "ranking": "false"}, "ranking-not-boolean"),
    Case("ranking is null", [A], {**ALPACA, "ranking": None}, "not-ranked"),
    Case("chosen null", [A, {**A, "chosen": None}], ALPACA, "answer-missing"),
    Case("chosen key missing", [A, {"instruction": "q", "rejected": "x"}], ALPACA, "answer-missing"),
    Case("chosen a number once", [A, {**A, "chosen": 3}], ALPACA, "mixed-types"),
    Case("chosen always a number", [{**A, "chosen": 1, "rejected": 2}], ALPACA, "no-usable-rows"),
    Case("chosen a boolean", [{**A, "chosen": True}], ALPACA, "no-usable-rows"),
    Case("chosen digits as text", [{**A, "chosen": "1", "rejected": "2"}], ALPACA, ""),
    Case("answers lists", [{**A, "chosen": ["a", "b"]}], ALPACA, "answer-shape"),
    Case("one answer a list", [A, {**A, "chosen": ["a"]}], ALPACA, "mixed-types"),
    Case("prompt a list", [{**A, "instruction": ["x"]}], ALPACA, "prompt-not-text"),
    Case("prompt a number", [{**A, "instruction": 3}], ALPACA, "prompt-not-text"),
    Case("prompt null", [A, {**A, "instruction": None}], ALPACA, "empty-prompt"),
    Case("chosen empty", [{**A, "chosen": ""}], ALPACA, "empty-answer"),
    Case("history good", [{**A, "chosen": "c", "history": []}, {**A, "history": [["a", "b"]]}], with_columns(ALPACA, history="history"), ""),
    Case("history of threes", [{**A, "history": [["a", "b", "c"]]}], with_columns(ALPACA, history="history"), "history-shape"),
    Case("history null inside", [{**A, "history": [["a", None]]}], with_columns(ALPACA, history="history"), "content-not-text"),
    Case("system null", [{**A, "chosen": "c", "system": None}, {**A, "system": "x"}], with_columns(ALPACA, system="system"), ""),
    Case("an unused column mixes types", [{**A, "id": 3}, {**A, "id": "3"}], ALPACA, "mixed-types"),
    Case("an unused column mixes deep inside", [{**A, "m": {"a": 1}}, {**A, "m": {"a": "x"}}], ALPACA, "mixed-types"),
    Case("a list mixes types", [{**A, "m": [1, "a"]}], ALPACA, "mixed-types"),
    Case("numbers and booleans", [{**A, "m": 3}, {**A, "m": True}], ALPACA, "mixed-types"),
    Case("lists and objects", [{**A, "m": []}, {**A, "m": {}}], ALPACA, "mixed-types"),
    Case("whole and broken numbers", [{**A, "m": 3}, {**A, "m": 3.5, "chosen": "c"}], ALPACA, ""),
    Case("good sharegpt", [S, {**S, "chosen": gpt("z")}], SHAREGPT, ""),
    Case("chosen by the user", [{**S, "chosen": human("x")}], SHAREGPT, "answer-role"),
    Case("chosen by nobody known", [{**S, "chosen": {"from": "bot", "value": "x"}}], SHAREGPT, "role-unknown"),
    Case("answers as text", [{**S, "chosen": "x", "rejected": "y"}], SHAREGPT, "answer-shape"),
    Case("answers as lists", [{**S, "chosen": [gpt("x")], "rejected": [gpt("y")]}], SHAREGPT, "answer-shape"),
    Case("answer text null", [S, {**S, "chosen": gpt(None)}], SHAREGPT, "content-not-text"),
    Case("prompt text null", [S, {**S, "conversations": [human(None)]}], SHAREGPT, "content-not-text"),
    Case("prompt text a list", [{**S, "conversations": [human([{"type": "text", "text": "q"}])]}], SHAREGPT, "content-not-text"),
    Case("sharegpt chosen null", [S, {**S, "chosen": None}], SHAREGPT, "answer-missing"),
    Case("even prompt", [S, {**S, "conversations": [human("hi"), gpt("s")]}], SHAREGPT, "even-prompt"),
    Case("assistant first", [S, {**S, "conversations": [gpt("hi")]}], SHAREGPT, "role-order"),
    Case("tags of another format", [{**S, "conversations": [{"from": "user", "value": "q"}]}], SHAREGPT, "role-tags"),
    Case("keys of another format", [{**S, "conversations": [{"role": "human", "content": "q"}]}], SHAREGPT, "column-absent"),
    Case("system message", [{**S, "conversations": [{"from": "system", "value": "S"}, human("q")]}], SHAREGPT, ""),
    Case("two system messages", [S, {**S, "conversations": [{"from": "system", "value": "S"}] * 2 + [human("q")]}], SHAREGPT, "role-order"),
    Case("messages null", [S, {**S, "conversations": None}], SHAREGPT, "messages-shape"),
    Case("messages empty", [S, {**S, "conversations": []}], SHAREGPT, "prompt-empty-list"),
    Case("messages text", [{**S, "conversations": "hi"}], SHAREGPT, "messages-shape"),
    Case("sharegpt without columns", [S], {"formatting": "sharegpt", "ranking": True}, "column-absent"),
    Case("good tags", [O], {**O_INFO, "formatting": "sharegpt"}, ""),
    Case("system message without its tag", [O, {**O, "messages": [{"role": "system", "content": "S"}, *O["messages"]]}], {**O_INFO, "formatting": "sharegpt"}, "role-tags"),
    Case("openai", [O], {**O_INFO, "formatting": "openai"}, "openai-system"),
    Case("openai unknown role", [{**O, "messages": [{"role": "developer", "content": "q"}]}], {**O_INFO, "formatting": "openai"}, "role-unknown"),
    Case("function call", [{**S, "conversations": [human("q"), {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}, {"from": "observation", "value": "42"}]}], SHAREGPT, ""),
    Case("function call not JSON", [{**S, "conversations": [human("q"), {"from": "function_call", "value": "f()"}, {"from": "observation", "value": "42"}]}], SHAREGPT, "tools-not-json"),
    Case("function call without arguments", [{**S, "conversations": [human("q"), {"from": "function_call", "value": '{"name": "f"}'}, {"from": "observation", "value": "42"}]}], SHAREGPT, "tools-not-json"),
    Case("tools not JSON", [{**S, "tools": "f"}], with_columns(SHAREGPT, tools="tools"), "tools-not-json"),
    Case("images under a text template", [{**S, "images": ["a.png"]}], with_columns(SHAREGPT, images="images"), "media-unsupported"),
    Case("a column that one row lacks", [S, {**S, "chosen": gpt("z"), "score": 1.0}], SHAREGPT, ""),
]  # fmt: skip

CSV_INFO = {"ranking": True, "columns": {"prompt": "p", "chosen": "c", "rejected": "r"}}


def parquet(**columns: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), path)

    return write


def arrow_stream(path: Path) -> None:
    import pyarrow

    table = pyarrow.table({"p": ["a"], "c": ["x"], "r": ["y"]})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def string_view(path: Path) -> None:
    import pyarrow

    parquet(p=["a"], c=pyarrow.array(["x"], pyarrow.string_view()), r=["y"])(path)


LINE = json.dumps(A)
FILES = [  # file name, case
    ("d.json", Case("byte order mark", b"\xef\xbb\xbf" + json.dumps([A]).encode(), ALPACA, "load-failed")),
    ("d.jsonl", Case("byte order mark", b"\xef\xbb\xbf" + LINE.encode(), ALPACA, "")),
    ("d.json", Case("not UTF-8", json.dumps([A]).encode().replace(b"hi", b"h\xff"), ALPACA, "load-failed")),
    ("d.jsonl", Case("not UTF-8", LINE.encode().replace(b"hi", b"h\xff"), ALPACA, "load-failed")),
    ("d.json", Case("lone surrogate", json.dumps([A]).replace("hi", "\\ud83d"), ALPACA, "broken-encoding")),
    ("d.jsonl", Case("lone surrogate", LINE.replace("hi", "\\ud83d"), ALPACA, "load-failed")),
    ("d.json", Case("number past 64 bits", json.dumps([{**A, "m": 2**64}]), ALPACA, "load-failed")),
    ("d.jsonl", Case("number past 64 bits", json.dumps({**A, "m": 2**64}), ALPACA, "")),
    ("d.jsonl", Case("number of 5,000 digits", LINE[:-1] + ', "m": ' + "9" * 5000 + "}", ALPACA, "")),
    ("d.json", Case("nested 2,000 deep", "[" + LINE[:-1] + ', "m": ' + "[" * 2000 + "]" * 2000 + "}]", ALPACA, "load-failed")),
    ("d.json", Case("empty list", "[]", ALPACA, "load-failed")),
    ("d.json", Case("empty file", "", ALPACA, "load-failed")),
    ("d.json", Case("one object", LINE, ALPACA, "")),
    ("d.jsonl", Case("pretty object", json.dumps(A, indent=1), ALPACA, "")),
    ("d.json", Case("lines in .json", LINE + "\n" + LINE, ALPACA, "duplicate-pairs")),
    ("d.jsonl", Case("list in .jsonl", json.dumps([A, A]), ALPACA, "duplicate-pairs")),
    ("d.jsonl", Case("blank lines", LINE + "\n\n" + LINE, ALPACA, "duplicate-pairs")),
    ("d.jsonl", Case("torn last line", LINE + "\n" + LINE[:-5], ALPACA, "load-failed")),
    ("d.json", Case("torn list", json.dumps([A, A])[:-5], ALPACA, "load-failed")),
    ("d.json", Case("trailing comma", "[" + LINE + ",]", ALPACA, "load-failed")),
    ("d.json", Case("rows under a key", json.dumps({"data": [A, A]}), ALPACA, "column-absent")),
    ("d.json", Case("columns instead of rows", json.dumps({"instruction": ["hi"], "chosen": ["a"], "rejected": ["b"]}), ALPACA, "prompt-not-text")),
    ("d.json", Case("list of text", '["a", "b"]', ALPACA, "load-failed")),
    ("d.json", Case("two lists", json.dumps([A]) + "\n" + json.dumps([A]), ALPACA, "load-failed")),
    ("d.csv", Case("good", "p,c,r\nhi,a,b\n", CSV_INFO, "")),
    ("d.csv", Case("words for null", "p,c,r\nhi,None,b\nhi,NA,b\nx,null,N/A\nq,a,b\n", CSV_INFO, "answer-missing")),
    ("d.csv", Case("numbers only", "p,c,r\nhi,1,2\nq,3,4\n", CSV_INFO, "no-usable-rows")),
    ("d.csv", Case("numbers and text", "p,c,r\nhi,1,2\nq,3,4\nz,a,b\n", CSV_INFO, "")),
    ("d.csv", Case("booleans only", "p,c,r\nhi,True,False\n", CSV_INFO, "no-usable-rows")),
    ("d.csv", Case("semicolons", "p;c;r\nhi;a;b\n", CSV_INFO, "column-absent")),
    ("d.csv", Case("empty cells", "p,c,r\nhi,,b\n,a,b\n", CSV_INFO, "empty-prompt")),
    ("d.csv", Case("byte order mark", b"\xef\xbb\xbfp,c,r\nhi,a,b\n", CSV_INFO, "")),
    ("d.csv", Case("a cell too many", "p,c,r\nhi,a,b\nhi,a,b,c\n", CSV_INFO, "load-failed")),
    ("d.csv", Case("a cell too few", "p,c,r\nhi,a,b\nhi,a\n", CSV_INFO, "answer-missing")),
    ("d.csv", Case("open quote", 'p,c,r\nhi,"a,b\nhi,a,b\n', CSV_INFO, "load-failed")),
    ("d.csv", Case("Latin-1", "p,c,r\nhi,é,b\n".encode("latin-1"), CSV_INFO, "load-failed")),
    ("d.csv", Case("header only", "p,c,r\n", CSV_INFO, "load-failed")),
    ("d.csv", Case("line breaks and quotes in cells", 'p,c,r\n"a\nb","say ""x""",b\n', CSV_INFO, "")),
    ("d.txt", Case("text file", "a\nb\n", CSV_INFO, "column-absent")),
    ("d.parquet", Case("good", parquet(p=["a"], c=["x"], r=["y"]), CSV_INFO, "")),
    ("d.parquet", Case("binary answers", parquet(p=["a"], c=[b"x"], r=["y"]), CSV_INFO, "answer-shape")),
    ("d.parquet", Case("structs", parquet(conversations=[[human("q")]], chosen=[gpt("x")], rejected=[gpt("y")]), SHAREGPT, "")),
    ("d.parquet", Case("string views", string_view, CSV_INFO, "load-failed")),
    ("d.parquet", Case("no rows", parquet(p=[], c=[], r=[]), CSV_INFO, "load-failed")),
    ("d.parquet", Case("not Parquet", b"PAR1 no", CSV_INFO, "load-failed")),
    ("d.arrow", Case("stream", arrow_stream, CSV_INFO, "")),
]  # fmt: skip

BIG = {"instruction": "x " * 12000, "chosen": "a", "rejected": "b"}
BIG_INFO = with_columns(ALPACA, system="system", history="history")
LATE = [  # 11 MB of rows, then three of another kind
    ("d.jsonl", Case("null, later text", [{**BIG, "system": None}, {**BIG, "system": "S"}], ALPACA, "late-column")),
    ("d.jsonl", Case("[] first", [{**BIG, "history": []}, {**BIG, "history": [["a", "b"]]}], ALPACA, "late-column")),
    ("d.jsonl", Case("new column later", [BIG, {**BIG, "extra": "S"}], ALPACA, "late-column")),
    ("d.jsonl", Case("column gone later", [{**BIG, "extra": "S"}, BIG], ALPACA, "")),
    ("d.json", Case("null, later text in a list", [{**BIG, "system": None}, {**BIG, "system": "S"}], ALPACA, "")),
]  # fmt: skip


ANY = "whatever, so long as both sides agree"
FOLDERS = [  # two files; which of them comes first, and so decides the types, is up to os.listdir
    ("columns differ", [A], [{**A, "chosen": "c", "x": "s"}]),
    ("text and number", [{**A, "x": 1}], [{**A, "chosen": "c", "x": "s"}]),
    ("null and text", [{**A, "x": None}], [{**A, "chosen": "c", "x": "s"}]),
    ("objects with more keys", [{**A, "x": {"a": 1}}], [{**A, "chosen": "c", "x": {"a": 1, "b": 2}}]),
    ("answers text and list", [A], [{**A, "chosen": ["c"]}]),
    ("the same columns", [A], [{**A, "chosen": "c"}]),
]


def compare(case: Case, folder: Path, name: str, model: Path) -> None:
    """Both sides on one file: stopped or not, and how many pairs."""
    info = {"file_name": name, **case.info}
    real = train_rows(folder, info, model)
    try:
        ours = check_data(
            "d",
            [f"dataset_dir={folder}", "template=qwen", f"model_name_or_path={model}", "cutoff_len=2048"],
            lambda what, total: nullcontext(lambda count: None),
        )
    except BadInput as bad:
        raise AssertionError(f"refused: {bad}; LLaMA-Factory: {real.error or len(real.rows)}") from bad
    ids = {finding.id for finding in ours.findings}
    errors = {finding.id for finding in ours.findings if finding.severity == "error"}
    stops = bool(real.error) or not real.rows  # "Cannot find valid samples" comes with the first log line
    assert bool(errors) == stops, (real.error, len(real.rows), ids)
    if not stops:
        assert ours.run.pairs == len(real.rows)
        lengths = zip(ours.run.lengths.prompt, ours.run.lengths.chosen, ours.run.lengths.rejected, strict=True)
        for row, (prompt, chosen, rejected) in zip(real.rows, lengths, strict=True):
            assert len(row["chosen_input_ids"]) == prompt + chosen or not ours.run.lengths.all_exact
            assert len(row["rejected_input_ids"]) == prompt + rejected or not ours.run.lengths.all_exact
    if case.finds == ANY:
        return
    if case.finds:
        assert f"data.{case.finds}" in ids
    else:
        assert not {finding.id for finding in ours.findings if finding.severity != "info"}


def write(path: Path, content: Any) -> None:
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.what)
def test_rows(case: Case, name: str, tmp_path: Path, model_folder: Path):
    write(tmp_path / name, case.content)
    compare(case, tmp_path, name, model_folder)


@pytest.mark.parametrize(("name", "case"), FILES, ids=lambda value: getattr(value, "what", value))
def test_files(name: str, case: Case, tmp_path: Path, model_folder: Path):
    write(tmp_path / name, case.content)
    compare(case, tmp_path, name, model_folder)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize(("what", "one", "other"), FOLDERS, ids=lambda value: value if isinstance(value, str) else "")
def test_folders(what: str, one: list, other: list, suffix: str, tmp_path: Path, model_folder: Path):
    import pyarrow

    (tmp_path / "m").mkdir()
    for name, rows in (("a", one), ("b", other)):
        content = parquet(**pyarrow.Table.from_pylist(rows).to_pydict()) if suffix == "parquet" else rows
        write(tmp_path / "m" / f"{name}.{suffix}", content)
    compare(Case(what, None, ALPACA, ANY), tmp_path, "m", model_folder)


@pytest.mark.parametrize(("name", "case"), LATE, ids=lambda value: getattr(value, "what", value))
def test_json_lines_take_their_types_from_the_first_ten_mib(name: str, case: Case, tmp_path: Path, model_folder: Path):
    first, later = case.content
    write(tmp_path / name, [{**first, "instruction": f"{n} {BIG['instruction']}"} for n in range(460)] + [later])
    ours = check_data("d", [f"dataset_dir={_declared(tmp_path, name, case)}"], lambda w, t: nullcontext(lambda c: None))
    errors = {finding.id for finding in ours.findings if finding.severity == "error"}
    real = _load_only(tmp_path, name)
    assert bool(errors) == bool(real), (real, errors)
    assert errors == ({f"data.{case.finds}"} if case.finds else set())


def _declared(folder: Path, name: str, case: Case) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps({"d": {"file_name": name, **case.info}}))
    return folder


def _load_only(folder: Path, name: str) -> str:
    """The error of datasets.load_dataset, the call LLaMA-Factory makes, or ""."""
    from datasets import load_dataset

    try:
        load_dataset("json", data_files=[str(folder / name)], split="train", cache_dir=str(folder / "cache"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
