"""Rows come out of a file whole, in order and in bounded memory; anything unreadable is said, never raised."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dpofit.data.json_rows as module
from dpofit.data.json_rows import first_chunk_lines, is_json_lines
from dpofit.data.loading import LoadFailure
from dpofit.data.rows import read_rows

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ROWS = st.lists(st.dictionaries(TEXT, st.one_of(TEXT, st.lists(TEXT, max_size=2), st.none()), max_size=3), min_size=1)
ANY_FOLDER = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def rows_of(path: Path) -> list:
    return [row for _, row in read_rows(path, lambda count: None)]


@ANY_FOLDER
@given(rows=ROWS, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]), chunk=st.integers(1, 40))
def test_a_json_list_reads_the_same_however_it_falls_into_chunks(
    tmp_path, monkeypatch, rows, ascii_only, indent, chunk
):
    monkeypatch.setattr(module, "CHUNK_CHARS", chunk)
    path = tmp_path / "d.json"
    path.write_text(json.dumps(rows, ensure_ascii=ascii_only, indent=indent), encoding="utf-8")
    assert rows_of(path) == rows


@ANY_FOLDER
@given(rows=ROWS, chunk=st.integers(1, 40))
def test_json_lines_are_numbered_by_line(tmp_path, monkeypatch, rows, chunk):
    monkeypatch.setattr(module, "CHUNK_CHARS", chunk)
    path = tmp_path / "d.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    numbered = list(read_rows(path, lambda count: None))
    assert numbered == [(1 + 2 * n, row) for n, row in enumerate(rows)]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200), suffix=st.sampled_from(["json", "jsonl", "csv", "txt", "parquet", "arrow"]))
def test_any_bytes_give_rows_or_a_load_failure(tmp_path, content, suffix):
    pytest.importorskip("pyarrow")
    path = tmp_path / f"d.{suffix}"
    path.write_bytes(content)
    try:
        assert all(isinstance(row, dict) for row in rows_of(path))
    except LoadFailure as failure:
        assert failure.why and failure.fix


@ANY_FOLDER
@given(rows=ROWS, cut=st.floats(0.05, 0.95))
def test_a_cut_list_gives_the_rows_before_the_cut_and_says_so(tmp_path, rows, cut):
    path = tmp_path / "d.json"
    text = json.dumps(rows)
    path.write_text(text[: max(1, int(len(text) * cut))])
    seen = []
    with pytest.raises(LoadFailure):
        for _, row in read_rows(path, lambda count: None):
            seen.append(row)
    assert seen == rows[: len(seen)]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str):
    """48 MB of rows, peak under half of it: a few chunks of 4 million characters."""
    row = json.dumps({"instruction": "x" * 2000, "chosen": "y" * 1000})
    with (tmp_path / f"d.{suffix}").open("w") as file:
        file.write("[" if suffix == "json" else "")
        for n in range(16_000):
            file.write((("," if n else "") if suffix == "json" else "") + row + "\n")
        file.write("]" if suffix == "json" else "")
    tracemalloc.start()
    count = sum(1 for _ in read_rows(tmp_path / f"d.{suffix}", lambda c: None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 16_000
    assert peak < 24e6


def test_progress_adds_up_to_the_file(tmp_path: Path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = [{"p": f"{n} 中文", "c": "x", "r": "y"} for n in range(3000)]
    (tmp_path / "d.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "d.csv").write_text("p,c,r\n" + "".join(f"{row['p']},x,y\n" for row in rows), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for path in sorted(tmp_path.iterdir()):
        done: list[int] = []
        assert sum(1 for _ in read_rows(path, done.append)) == 3000
        assert 0.95 * path.stat().st_size <= sum(done) <= path.stat().st_size


def test_a_row_of_more_than_64_million_characters_is_taken_for_broken(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_CHARS", 100)
    monkeypatch.setattr(module, "LONGEST_ROW_CHARS", 1000)
    (tmp_path / "d.json").write_text('[{"a": "' + "x" * 10_000)
    with pytest.raises(LoadFailure, match=r"d\.json:1: not JSON"):
        rows_of(tmp_path / "d.json")


def test_only_json_lines_over_ten_mib_have_a_first_chunk(tmp_path: Path):
    line = json.dumps({"a": "x" * (1 << 20)}) + "\n"
    (tmp_path / "small.jsonl").write_text(line * 9)
    (tmp_path / "large.jsonl").write_text(line * 12)
    (tmp_path / "list.json").write_text("[" + ",".join([line] * 12) + "]")
    assert first_chunk_lines(tmp_path / "small.jsonl") is None
    assert first_chunk_lines(tmp_path / "large.jsonl") == 10  # the tenth line runs past 10 MiB and is read to its end
    assert first_chunk_lines(tmp_path / "list.json") is None
    assert is_json_lines(tmp_path / "small.jsonl") and not is_json_lines(tmp_path / "list.json")
