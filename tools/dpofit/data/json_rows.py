"""Reads JSON and JSON lines one value at a time, failing where the libraries under Hugging Face `datasets` 4.0.0 do."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dpofit.data.loading import LONGEST_ROW_CHARS, Advance, LoadFailure, Row
from dpofit.data.spec import FILE_TYPES

CHUNK_CHARS = 4 << 20
JSON_CHUNK_BYTES = 10 << 20  # datasets 4.0.0 packaged_modules/json/json.py: chunksize
# pyarrow refuses JSON lines with either half alone; pandas drops a lone first half from a list and refuses a second
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_LOW = re.compile("[\udc00-\udfff]")


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


def read_json(path: Path, advance: Advance) -> Iterator[tuple[int, Row]]:
    """(number, row) in file order; the number is the row's in a list, the line's in JSON lines. Raises LoadFailure."""
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
