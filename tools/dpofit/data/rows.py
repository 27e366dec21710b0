"""Reads data files row by row in bounded memory, failing where Hugging Face `datasets` 4.0.0 would fail."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpofit.data.json_rows import read_json
from dpofit.data.loading import LONGEST_ROW_CHARS, Advance, LoadFailure, Row
from dpofit.data.spec import FILE_TYPES

CSV_CHUNK_ROWS = 10_000  # datasets 4.0.0 packaged_modules/csv/csv.py: chunksize of pandas.read_csv
# pandas.read_csv turns these cells into nulls (pandas._libs.parsers.STR_NA_VALUES)
CSV_NULLS = frozenset(
    (
        *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"),
        *("N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
    )
)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|infinity)\s*", re.IGNORECASE)
_BOOLEANS = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}


def read_rows(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    """(number, row) in file order. The number counts rows from 1; in a file of JSON lines it is the line.

    Raises LoadFailure where `datasets.load_dataset` would.
    """
    reader = {"json": read_json, "csv": _csv, "parquet": _parquet, "arrow": _arrow, "text": _text}[
        FILE_TYPES[path.suffix[1:]]
    ]
    try:
        yield from reader(path, advance)
    except UnicodeDecodeError as error:
        # pandas and pyarrow read UTF-8 only
        why = f"not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x})"
        raise LoadFailure(path.name, why, f"Convert it: iconv -f <encoding> -t utf-8 {path.name}") from None
    except OSError as error:
        raise LoadFailure(path.name, f"cannot be read: {error.strerror or error}", "Check the file") from None


def _csv(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(LONGEST_ROW_CHARS)
    told = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, None)
            number = 0
            chunk: list[list[str]] = []
            for cells in reader:
                if not cells:
                    continue  # pandas skips blank lines
                number += 1
                if len(cells) > len(header or []):
                    why = f"{len(cells)} cells under {len(header or [])} column names"
                    raise LoadFailure(f"{path.name}:{number}", why, "Quote cells that contain commas")
                chunk.append(cells)
                if len(chunk) == CSV_CHUNK_ROWS:
                    yield from enumerate(_csv_chunk(header or [], chunk), number - len(chunk) + 1)
                    chunk = []
                    position = file.buffer.tell()  # type: ignore[attr-defined]
                    advance(position - told)
                    told = position
            yield from enumerate(_csv_chunk(header or [], chunk), number - len(chunk) + 1)
        except csv.Error as error:
            raise LoadFailure(f"{path.name}:{number + 1}", str(error), "Close the quotes of this cell") from None
        if number == 0:
            raise LoadFailure(path.name, "holds no rows", "Write at least one pair")
    advance(path.stat().st_size - told)


def _csv_chunk(header: list[str], chunk: list[list[str]]) -> Iterator[Row]:
    """Cells as pandas types them: null words become None, a column of numbers or booleans is not text."""
    columns = []
    for index in range(len(header)):
        cells = [row[index] if index < len(row) else "" for row in chunk]
        columns.append(_typed([None if cell in CSV_NULLS else cell for cell in cells]))
    for values in zip(*columns, strict=True):
        yield dict(zip(header, values, strict=True))


def _typed(cells: list[str | None]) -> list[Any]:
    words = [cell for cell in cells if cell is not None]
    if words and all(cell in _BOOLEANS for cell in words) and len(words) == len(cells):
        return [_BOOLEANS[cell] for cell in words]
    if all(_NUMBER.fullmatch(cell) for cell in words):
        return [None if cell is None else float(cell) for cell in cells]
    return list(cells)


def _parquet(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _refuse_views(path, file.schema_arrow)
        total = file.metadata.num_rows
        if total == 0:
            raise LoadFailure(path.name, "holds no rows", "Write at least one pair")
        size, number = path.stat().st_size, 0
        for batch in file.iter_batches(batch_size=512):
            for row in batch.to_pylist():
                number += 1
                yield number, row
            advance(size * batch.num_rows // total)
    except pyarrow.ArrowException as error:
        raise LoadFailure(path.name, f"not readable Parquet: {error}", "Write the file again") from None


def _arrow(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_stream(source)
                batches: Iterator[Any] = iter(reader)
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            _refuse_views(path, reader.schema)
            number = 0
            for batch in batches:
                for start in range(0, batch.num_rows, 512):
                    for row in batch.slice(start, 512).to_pylist():
                        number += 1
                        yield number, row
    except pyarrow.ArrowException as error:
        raise LoadFailure(path.name, f"not readable Arrow: {error}", "Write the file again") from None
    advance(path.stat().st_size)


def _refuse_views(path: Path, schema: Any) -> None:
    """datasets 4.0.0 features.py has no type for Arrow's string_view and binary_view."""
    views = [field.name for field in schema if str(field.type) in ("string_view", "binary_view")]
    if views:
        why = (
            f"columns {', '.join(views)} are of Arrow type {schema.field(views[0]).type}, which datasets does not know"
        )
        raise LoadFailure(path.name, why, "Cast them to string before writing")


def _text(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            advance(len(line.encode()))
            yield number, {"text": line.rstrip("\n")}
