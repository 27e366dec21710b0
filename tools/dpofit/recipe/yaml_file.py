"""Reads a recipe file into plain values the way OmegaConf does for LLaMA-Factory, with the line of every key.

What differs from YAML 1.1 as PyYAML reads it (omegaconf 2.4.0 _yaml.py): `1e-6` is a float, dates stay text,
duplicate keys and recursive aliases are errors, aliases may not expand without bound. Interpolations (`${key}`) are
left as text here; interpolation.py resolves them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpofit.errors import BadInput, Problem

MAX_NODES = 10_000  # after alias expansion, as in omegaconf 2.4.0
_MAX_DEPTH = 100  # deeper than any configuration; well inside Python's recursion limit
_STR_TAG = "tag:yaml.org,2002:str"
_NULL_TAG = "tag:yaml.org,2002:null"
_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml: 10 times faster
    """A safe loader with OmegaConf's floats and without dates."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True, slots=True)
class Document:
    """A configuration file: top-level values and the 1-based line each top-level key stands on."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    def where(self, key: str | None) -> str:
        """`file:line` of a top-level key; the file alone when the key is not in it."""
        line = self.lines.get(key) if key else None
        return f"{self.path}:{line}" if line else str(self.path)


def read_document(path: Path) -> Document:
    """A recipe file: `.json` as JSON, anything else as YAML. BadInput names every problem with its line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(path, None, f"is not UTF-8 text (byte {error.start})", "Save it as UTF-8.") from None
    except OSError as error:
        raise _bad(path, None, f"cannot be read: {error.strerror}", "Give a readable file.") from None
    values, lines = _read_json(path, text) if path.suffix.lower() == ".json" else _read_yaml(path, text)
    return Document(path, values, lines)


def parse_scalar(text: str) -> Any:
    """The value of a `key=value` override: one YAML document, as OmegaConf.from_cli reads it. ValueError if broken."""
    try:
        node = _single_node(text)
        if duplicates := _duplicate_keys(node):
            raise ValueError(f"key {duplicates[0][0]} appears twice")
        return _construct(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(_first_line(error)) from None


def _read_yaml(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        node = _single_node(text)
        if node is None or node.tag == _NULL_TAG:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise _bad(path, node.start_mark.line + 1, "holds no keys with values", "Write `key: value` lines.")
        if duplicates := _duplicate_keys(node):
            raise BadInput(
                [
                    Problem(f"{path}:{line}", key, f"appears twice (first on line {first})", "Keep one of the two.")
                    for key, first, line in duplicates
                ]
            )
        lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
        values = _construct(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else None
        raise _bad(path, line, f"is not valid YAML: {_first_line(error)}", "Correct the syntax.") from None
    return {str(key): value for key, value in values.items()}, lines


def _read_json(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        repeated.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(items)

    try:
        values = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise _bad(path, error.lineno, f"is not valid JSON: {error.msg}", "Correct the syntax.") from None
    except RecursionError:
        raise _bad(path, None, "is nested too deeply", "Flatten it.") from None
    if not isinstance(values, dict):
        raise _bad(path, None, "holds no object", 'Write {"key": value}.')
    if repeated:
        raise BadInput([Problem(str(path), key, "appears twice", "Keep one of the two.") for key in repeated])
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for key in re.findall(r'"((?:[^"\\]|\\.)*)"\s*:', line):
            lines.setdefault(key, number)
    return values, lines


def _single_node(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    if node is not None:
        _check_size(node)
    return node


def _construct(node: yaml.Node | None) -> Any:
    if node is None:
        return None
    value = _Loader("").construct_document(node)
    _check_types(value, node)
    return value


def _check_size(root: yaml.Node) -> None:
    """Refuses recursive aliases, alias bombs and absurd nesting before anything is built."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        if id(node) in open_nodes:
            raise _error("an alias refers to itself", node)
        if depth > _MAX_DEPTH:
            raise _error(f"nested more than {_MAX_DEPTH} deep", node)
        if id(node) not in sizes:
            open_nodes.add(id(node))
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in _children(node))
            open_nodes.discard(id(node))
        return sizes[id(node)]

    if size(root, 0) > MAX_NODES:
        raise _error(f"holds more than {MAX_NODES:,} values once aliases are expanded", root)


def _duplicate_keys(root: yaml.Node | None) -> list[tuple[str, int, int]]:
    """(key, first line, repeated line) of every repeated text key, at any depth."""
    found: list[tuple[str, int, int]] = []
    seen: set[int] = set()
    pending = [root] if root is not None else []
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, _ in node.value:
                if key.tag != _STR_TAG:
                    continue
                line = key.start_mark.line + 1
                if key.value in first:
                    found.append((key.value, first[key.value], line))
                first.setdefault(key.value, line)
        pending.extend(_children(node))
    return sorted(found, key=lambda duplicate: duplicate[2])


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_types(value: Any, node: yaml.Node) -> None:
    """Only what OmegaConf can hold: no sets, no dates, no null keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, (str, int, float, bytes)):
                raise _error(f"a {type(key).__name__} cannot be a key", node)
            _check_types(inner, node)
    elif isinstance(value, list):
        for inner in value:
            _check_types(inner, node)
    elif value is not None and not isinstance(value, (str, int, float, bytes)):
        raise _error(f"a {type(value).__name__} is not a value LLaMA-Factory can read", node)


def _error(text: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _first_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    problem = getattr(error, "problem", None) or getattr(error, "reason", None)
    return str(problem or error).splitlines()[0] if str(problem or error) else type(error).__name__


def _bad(path: Path, line: int | None, wrong: str, right: str) -> BadInput:
    return BadInput(Problem(f"{path}:{line}" if line else str(path), None, wrong, right))
