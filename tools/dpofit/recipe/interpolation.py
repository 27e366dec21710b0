"""Resolves OmegaConf's `${key}` and `${oc.env:NAME,default}` in a recipe's values.

Plain llamafactory-cli reads the file with OmegaConf but converts it with `to_container(resolve=False)`
(llamafactory 0.9.5 hparams/parser.py 93), so it hands the literal text `${key}` to its arguments. dpofit resolves
them, writes resolved files when it launches, and says so (`config.interpolation-unresolved`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

_START = re.compile(r"(\\*)\$\{")
_INT = re.compile(r"[+-]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[+-]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][+-]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[+-]?(?:inf|nan)", re.I)
_NODE = re.compile(r"(\.*)((?:[^.\[\]:{}\s]+|\[[^\[\]]+\])(?:\.[^.\[\]:{}\s]+|\[[^\[\]]+\])*)?")


class InterpolationError(ValueError):
    """An interpolation that OmegaConf would refuse, or that is not supported here."""


def has_interpolation(value: Any) -> bool:
    """Whether any text inside holds `${`."""
    if isinstance(value, dict):
        return any(has_interpolation(inner) for inner in value.values())
    if isinstance(value, list):
        return any(has_interpolation(inner) for inner in value)
    return isinstance(value, str) and "${" in value


def resolve(root: Mapping[str, Any], environment: Mapping[str, str], key: str) -> Any:
    """Value of a top-level key with every interpolation inside it resolved. Raises InterpolationError."""
    return _Resolver(root, environment).value(root[key], (key,))


class _Resolver:
    """One resolution: where values come from and which keys are being resolved now (to notice cycles)."""

    def __init__(self, root: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.root = root
        self.environment = environment
        self.open_paths: list[tuple[Any, ...]] = []

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self.value(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*path, index)) for index, inner in enumerate(value)]
        return self.text(value, path) if isinstance(value, str) and "${" in value else value

    def text(self, text: str, path: tuple[Any, ...]) -> Any:
        if path in self.open_paths:
            raise InterpolationError(f"refers to itself through ${{{_dotted(path)}}}")
        self.open_paths.append(path)
        try:
            return _joined(self._parts(text, path[:-1]))
        finally:
            self.open_paths.pop()

    def _parts(self, text: str, parent: tuple[Any, ...]) -> list[Any]:
        parts: list[Any] = []
        position = 0
        while match := _START.search(text, position):
            backslashes = len(match[1])
            literal = text[position : match.start()] + "\\" * (backslashes // 2)
            if backslashes % 2:  # `\${` is a literal `${`
                parts.append(literal + "${")
                position = match.end()
                continue
            if literal:
                parts.append(literal)
            end = _closing_brace(text, match.end())
            parts.append(self._interpolation(text[match.end() : end], parent))
            position = end + 1
        if position < len(text):
            parts.append(text[position:])
        return parts

    def _interpolation(self, inside: str, parent: tuple[Any, ...]) -> Any:
        inside = inside.strip()
        colon = _top_level(inside, ":")
        if colon:
            name, arguments = inside[: colon[0]].strip(), inside[colon[0] + 1 :]
            return self._call(name, [self._argument(part, parent) for part in _split(arguments)], parent)
        if "${" in inside:
            inside = str(_joined(self._parts(inside, parent)))
        return self._node(inside, parent)

    def _node(self, written: str, parent: tuple[Any, ...]) -> Any:
        match = _NODE.fullmatch(written)
        if not match or not match[2]:
            raise InterpolationError(f"${{{written}}} is not a key")
        dots = len(match[1])
        if dots > len(parent) + 1:
            raise InterpolationError(f"${{{written}}} climbs above the top of the file")
        base: tuple[Any, ...] = parent[: len(parent) - dots + 1] if dots else ()
        path: tuple[Any, ...] = base
        value: Any = self.root
        for step in (*base, *re.findall(r"[^.\[\]]+", match[2])):
            value, step = _child(value, step, written)
            path = path if len(path) < len(base) else (*path, step)
        path = (*base, *path[len(base) :])
        return self.value(value, path)

    def _call(self, name: str, arguments: list[Any], parent: tuple[Any, ...]) -> Any:
        if name == "oc.env" and 1 <= len(arguments) <= 2:
            if arguments[0] in self.environment:
                return self.environment[arguments[0]]
            if len(arguments) == 1:
                raise InterpolationError(f"environment variable {arguments[0]} is not set")
            return None if arguments[1] is None else str(arguments[1])
        if name == "oc.select" and 1 <= len(arguments) <= 2:
            try:
                return self._node(str(arguments[0]), ())
            except InterpolationError:
                if len(arguments) == 1:
                    return None
                return arguments[1]
        if name == "oc.decode" and len(arguments) == 1:
            return _primitive(arguments[0]) if isinstance(arguments[0], str) else arguments[0]
        raise InterpolationError(f"resolver {name!r} with {len(arguments)} arguments is not supported")

    def _argument(self, written: str, parent: tuple[Any, ...]) -> Any:
        written = written.strip()
        if len(written) >= 2 and written[0] in "'\"" and written[-1] == written[0]:
            inner = written[1:-1].replace("\\" + written[0], written[0])
            return self.text(inner, (*parent, object())) if "${" in inner else inner
        if "${" in written:
            return _joined(self._parts(written, parent))
        if written[:1] in ("[", "{"):
            raise InterpolationError(f"list and mapping arguments such as {written} are not supported")
        return _primitive(written)


def _child(value: Any, step: Any, written: str) -> tuple[Any, Any]:
    """The value under one step of a key path, and the step as the container knows it."""
    if isinstance(value, Mapping):
        for key in (step, _primitive(step) if isinstance(step, str) else step):
            if key in value:
                return value[key], key
    elif isinstance(value, list) and re.fullmatch(r"-?[0-9]+", str(step)) and -len(value) <= int(step) < len(value):
        return value[int(step)], int(step)
    raise InterpolationError(f"${{{written}}} names no key of this file")


def _primitive(written: str) -> Any:
    """An unquoted argument as OmegaConf's grammar types it."""
    lowered = written.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.fullmatch(written):
        return int(written)
    if _FLOAT.fullmatch(written) or _SPECIAL_FLOAT.fullmatch(written):
        return float(written)
    return written


def _joined(parts: list[Any]) -> Any:
    """A lone part keeps its type; several become one text."""
    return parts[0] if len(parts) == 1 else "".join(str(part) for part in parts)


def _closing_brace(text: str, start: int) -> int:
    """Index of the `}` that ends the interpolation opened just before `start`."""
    depth, quote, index = 1, "", start
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    raise InterpolationError(f"`{text}` opens ${{ and never closes it")


def _top_level(text: str, wanted: str) -> list[int]:
    """Positions of a character outside quotes and brackets."""
    found, depth, quote = [], 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == wanted and depth == 0:
            found.append(index)
    return found


def _split(arguments: str) -> list[str]:
    if not arguments.strip():
        return []
    cuts = [-1, *_top_level(arguments, ","), len(arguments)]
    return [arguments[left + 1 : right] for left, right in pairwise(cuts)]


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(step) for step in path)
