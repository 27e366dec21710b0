"""Tracks the kinds of values per column, because one column of two kinds makes the whole file fail to load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["string", "number", "boolean", "list", "object", "binary"]
_KINDS: dict[type, Kind] = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    list: "list",
    dict: "object",
    bytes: "binary",
}
ABSENT = "absent or empty"
MAX_CONFLICTS = 20
MAX_PATHS = 10_000  # objects used as maps, one key per row, would otherwise grow without bound


@dataclass(frozen=True, slots=True)
class Conflict:
    """One column that the loader cannot give one type, and where (`file:row`) the two kinds stand.

    `first` is ABSENT when the column has no value where its type is decided.
    """

    column: str
    first: str
    first_where: str
    second: str
    second_where: str


class ColumnKinds:
    """Feed it every row of one file; `conflicts` are what `datasets` 4.0.0 fails on.

    JSON: pyarrow "changed from string to number", or pandas' "Conversion failed for column". JSON lines are
    read 10 MiB at a time and later chunks are cast to the types of the first, so there a column that is new,
    or was only null or [] before, fails as well ("Couldn't cast array of type string to null"); CSV likewise
    in chunks of 10,000 rows, except that numbers do turn into text.
    """

    def __init__(self, name: str, first_chunk: int | None = None, text_wins: bool = False) -> None:
        """`name`: of the file. `first_chunk`: rows that fix the types, None when all do. `text_wins`: CSV's rule."""
        self._name = name
        self.conflicts: list[Conflict] = []
        self.columns: set[str] = set()  # every path seen with a key, `a`, `a.b`, `a[].b`
        self._kinds: dict[str, tuple[str, int]] = {}
        self._first_chunk = first_chunk
        self._text_wins = text_wins

    def see(self, number: int, row: dict[Any, Any]) -> None:
        late = self._first_chunk is not None and number > self._first_chunk
        for key, value in row.items():
            self._see(key, value, number, late)

    def _see(self, path: str, value: Any, number: int, late: bool) -> None:
        if path not in self.columns and len(self.columns) < MAX_PATHS:
            self.columns.add(path)
            if late and "[" not in path and value is None:
                self._conflict(path, ABSENT, 1, "null", number)
        if value is None:
            return
        kind = _KINDS.get(type(value), type(value).__name__)
        known = self._kinds.get(path)
        if known is None:
            if len(self._kinds) < MAX_PATHS:
                self._kinds[path] = (kind, number)
            if late:
                self._conflict(path, ABSENT, 1, kind, number)
        elif known[0] != kind and not (self._text_wins and known[0] == "string"):
            self._conflict(path, known[0], known[1], kind, number)
        if kind == "object":
            for key, item in value.items():
                self._see(f"{path}.{key}", item, number, late)
        elif kind == "list":
            inside = f"{path}[]"
            for item in value:
                self._see(inside, item, number, late)

    def against(self, first: ColumnKinds) -> list[Conflict]:
        """What keeps this file from being cast to the types of the data set's first file."""
        out = []
        for path, (kind, number) in self._kinds.items():
            known, where = first._kinds.get(path), f"{self._name}:{number}"
            if known is None:
                out.append(Conflict(path, ABSENT, first._name, kind, where))
            elif known[0] != kind and not (known[0] == "string" and kind in ("number", "boolean")):
                out.append(Conflict(path, known[0], f"{first._name}:{known[1]}", kind, where))
        empty = sorted(self.columns - first.columns - self._kinds.keys())
        out += [Conflict(path, ABSENT, first._name, "null", self._name) for path in empty if "[" not in path]
        return out[:MAX_CONFLICTS]

    def _conflict(self, column: str, first: str, first_row: int, second: str, second_row: int) -> None:
        new = all(conflict.column != column for conflict in self.conflicts)
        if new and len(self.conflicts) < MAX_CONFLICTS:
            first_where, second_where = f"{self._name}:{first_row}", f"{self._name}:{second_row}"
            self.conflicts.append(Conflict(column, first, first_where, second, second_where))
