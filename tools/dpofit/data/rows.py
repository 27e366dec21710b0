"""Reads data files row by row in bounded memory, failing where Hugging Face `datasets` 4.0.0 would fail."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dpofit.data.spec import FILE_TYPES

Row = dict[Any, Any]  # keys are column names
Advance = Callable[[int], None]  # told how many bytes of the file were just consumed

CHUNK_CHARS = 4 << 20
LONGEST_ROW_CHARS = 64 << 20  # a row longer than this is taken for broken JSON rather than read on and on
CSV_CHUNK_ROWS = 10_000  # datasets 4.0.0 packaged_modules/csv/csv.py: chunksize of pandas.read_csv
JSON_CHUNK_BYTES = 10 << 20  # datasets 4.0.0 packaged_modules/json/json.py: chunksize
# pandas.read_csv turns these cells into nulls (pandas._libs.parsers.STR_NA_VALUES)
CSV_NULLS = frozenset(
    (
        *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"),
        *("N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
    )
)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|infinity)\s*", re.IGNORECASE)
# pyarrow refuses JSON lines with either half alone; pandas drops a lone first half from a list and refuses a second
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_LOW = re.compile("[\udc00-\udfff]")
_BOOLEANS = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}


class LoadFailure(Exception):
    """The file cannot be loaded at all, by LLaMA-Factory either: where it breaks, why, and what to do."""

    def __init__(self, where: str, why: str, fix: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where, self.why, self.fix = where, why, fix


def read_rows(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    """(number, row) in file order. The number counts rows from 1; in a file of JSON lines it is the line.

    Raises LoadFailure where `datasets.load_dataset` would.
    """
    reader = {"json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow, "text": _text}[
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


def is_json_lines(path: Path) -> bool:
    """Whether a JSON file holds one object after another rather than one array; datasets reads these in chunks."""
    if FILE_TYPES.get(path.suffix[1:]) != "json":
        return False
    with path.open("rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"


def first_chunk_lines(path: Path) -> int | None:
    """How many lines datasets reads first and takes the column types from; None when that is the whole file."""
    if not is_json_lines(path) or path.stat().st_size <= JSON_CHUNK_BYTES:
        return None
    with path.open("rb") as file:
        return file.read(JSON_CHUNK_BYTES).count(b"\n") + 1


def _json(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as raw:
        has_bom = raw.read(3) == codecs.BOM_UTF8
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = _Text(file, advance)
        first = text.peek()
        if first == "[" and has_bom:
            # pyarrow skips the byte order mark of lines, pandas does not skip that of an array
            raise LoadFailure(f"{path.name}:1", "starts with a byte order mark", "Save it as UTF-8 without BOM")
        if first == "":
            raise LoadFailure(path.name, "is empty", "Write at least one pair")
        yield from (_array(path, text) if first == "[" else _lines(path, text))


def _array(path: Path, text: _Text) -> Iterator[tuple[int, Row]]:
    text.skip("[")
    number = 0
    if text.peek() == "]":
        raise LoadFailure(path.name, "holds no rows", "Write at least one pair")
    while True:
        number += 1
        yield number, _object(path, number, text, _LIST)
        separator = text.peek()
        if separator not in ("]", ","):
            why = "the file ends inside the list" if separator == "" else f"{separator!r} where ',' or ']' belongs"
            raise LoadFailure(f"{path.name}:{number}", why, "Close the JSON list; the file may be cut short")
        text.skip(separator)
        if separator == "]":
            break
    if text.peek() != "":
        raise LoadFailure(f"{path.name}:{number}", "something follows the JSON list", "Keep one list per file")


def _lines(path: Path, text: _Text) -> Iterator[tuple[int, Row]]:
    while text.peek() != "":
        line = text.line
        yield line, _object(path, line, text, _JSON_LINES)


def _object(path: Path, number: int, text: _Text, dialect: _Dialect) -> Row:
    where = f"{path.name}:{number}"
    try:
        row, escaped = text.decode(dialect.decoder)
    except json.JSONDecodeError as error:
        fix = "Repair or remove this row; the file may be cut short"
        raise LoadFailure(where, f"not JSON: {error.msg}", fix) from None
    except RecursionError:  # pandas: "Reached object decoding depth limit"; pyarrow crashes somewhat deeper
        raise LoadFailure(where, "nested too deeply", "Remove this row") from None
    except ValueError as error:
        raise LoadFailure(where, str(error), "Write the number as text, or remove the column") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise LoadFailure(where, f"the row is a {kind}, not an object", "Write one object per pair")
    if escaped and dialect.unloadable.search(json.dumps(row, ensure_ascii=False)):
        fix = "Remove the broken escape (\\ud800 to \\udfff without its other half)"
        raise LoadFailure(where, "half of a surrogate pair", fix)
    return row


class _Text:
    """A window over a text file that decodes one JSON value at a time."""

    def __init__(self, file: TextIO, advance: Advance) -> None:
        self._file, self._advance = file, advance
        self._buffer, self._at, self._ended, self._told = "", 0, False, 0
        self.line = 1

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in " \t\r\n":
                self.line += self._buffer[self._at] == "\n"
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more(CHUNK_CHARS):
                return ""

    def skip(self, character: str) -> None:
        self._at += len(character)

    def decode(self, decoder: json.JSONDecoder) -> tuple[Any, bool]:
        """The JSON value that starts here, and whether it has escaped surrogates. Raises json.JSONDecodeError."""
        self.peek()
        size = CHUNK_CHARS
        while True:
            try:
                value, end = decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError:
                too_long = len(self._buffer) - self._at > LONGEST_ROW_CHARS
                if too_long or not self._more(size):
                    raise
                size *= 2  # so that a long row is scanned a logarithmic number of times
            else:
                escaped = _ESCAPED_SURROGATE.search(self._buffer, self._at, end) is not None
                self.line += self._buffer.count("\n", self._at, end)
                self._at = end
                return value, escaped

    def _more(self, size: int) -> bool:
        if self._ended:
            return False
        piece = self._file.read(size)
        self._ended = piece == ""
        self._buffer, self._at = self._buffer[self._at :] + piece, 0
        position = self._file.buffer.tell()  # type: ignore[attr-defined]
        self._advance(position - self._told)
        self._told = position
        return not self._ended


def _as_pandas(digits: str) -> int:
    """pandas' ujson: "Value is too big!" past 64 bits."""
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError("a whole number of more than 64 bits")
    return value


def _as_pyarrow(digits: str) -> int | float:
    """pyarrow takes a whole number of more than 64 bits for a broken one."""
    return int(digits) if len(digits) < 20 else float(digits)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """What the library that reads a JSON file makes of numbers and of broken escapes."""

    decoder: json.JSONDecoder
    unloadable: re.Pattern[str]


_LIST = _Dialect(json.JSONDecoder(parse_int=_as_pandas), _LONE_LOW)
_JSON_LINES = _Dialect(json.JSONDecoder(parse_int=_as_pyarrow), _LONE_SURROGATE)


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
