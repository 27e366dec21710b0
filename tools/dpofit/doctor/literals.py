"""The texts that a match of a pattern can't do without: what the sieve looks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from dpofit.doctor.sieve import WINDOW_BYTES, is_short, weight

TABLE = Path(__file__).with_name("literals.json")  # pattern: texts; by scripts/render_diagnoses.py
MOST_ALTERNATIVES = 64  # of a literal with choices in it: `Exceeded (?:job|step) memory limit` has two


def required_literals(pattern: str) -> tuple[bytes, ...]:
    """Texts of which every match of the pattern, on a line between line breaks, holds at least one."""
    known = _table().get(pattern)
    return derived_literals(pattern) if known is None else tuple(text.encode("latin-1") for text in known)


@cache
def _table() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = json.loads(TABLE.read_bytes()) if TABLE.exists() else {}
    return found


def derived_literals(pattern: str) -> tuple[bytes, ...]:
    """The same from the pattern itself, which takes half a millisecond a pattern.

    () if none can be told. Of several choices the one that is long enough and least likely to occur by chance.
    """
    parsed = parser.parse(pattern.encode())
    return () if parsed.state.flags & re.IGNORECASE else _required(parsed)


def _required(tokens: Any, runs: tuple[bytes, ...] = (b"",)) -> tuple[bytes, ...]:
    """runs: all that may stand right before the tokens."""
    best: tuple[bytes, ...] = ()

    def offer(candidate: tuple[bytes, ...]) -> None:
        nonlocal best
        shorter = tuple(dict.fromkeys(text[1:] for text in candidate))  # without the digit before, ten become one
        for texts in (candidate, shorter):
            if all(texts) and _worth(texts) > _worth(best):
                best = texts

    for op, argument in tokens:
        options = _finite(op, argument)
        good = len(options) > 1 and _worth(runs)[0] == WINDOW_BYTES  # alternatives would only make more of them
        if options and not good and len(runs) * len(options) <= MOST_ALTERNATIVES:
            runs = tuple(run + option for run in runs for option in options)
            continue
        offer(runs)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT) and argument[0] > 0:
            offer(_required(argument[2], runs))
        elif op is ops.SUBPATTERN:
            offer(_required(argument[3], runs))
        elif op is ops.BRANCH:
            each = [_required(option, runs) for option in argument[1]]
            offer(tuple(literal for option in each for literal in option) if all(each) else ())
        runs = _ends(op, argument)
    offer(runs)
    return best


def _worth(literals: tuple[bytes, ...]) -> tuple[int, int, int]:
    """Long enough, then few, then unlikely to occur by chance."""
    shortest = min((WINDOW_BYTES if is_short(literal) else len(literal) for literal in literals), default=0)
    return min(shortest, WINDOW_BYTES), -len(literals), min(map(weight, literals), default=0)


def _finite(op: Any, argument: Any) -> tuple[bytes, ...]:
    """All texts that a part of a pattern matches, if they are few; () if not."""
    if op is ops.LITERAL:
        return (bytes([argument]),)
    if op is ops.AT:  # the scan puts a line break around a block
        return (b"\n", b"\r") if argument in (ops.AT_BEGINNING, ops.AT_END) else (b"",)
    if op is ops.IN:
        return _few_characters(argument)
    if op is ops.SUBPATTERN:
        return _product(argument[3])
    if op is ops.BRANCH:
        each = [_product(option) for option in argument[1]]
        return tuple(text for option in each for text in option) if all(each) else ()
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT) and argument[:2] == (0, 1):
        once = _product(argument[2])
        return (b"", *once) if once else ()
    return ()


def _ends(op: Any, argument: Any) -> tuple[bytes, ...]:
    """Texts of which every match of this part of a pattern ends with one: what stands before the next part."""
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT) and argument[0] > 0:
        return _product(argument[2]) or (b"",)
    if op is ops.SUBPATTERN and not _finite(op, argument) and argument[3]:
        return _ends(*argument[3][-1])
    return _finite(op, argument) or (b"",)


def _product(tokens: Any) -> tuple[bytes, ...]:
    texts: tuple[bytes, ...] = (b"",)
    for op, argument in tokens:
        options = _finite(op, argument)
        if not options or len(texts) * len(options) > MOST_ALTERNATIVES:
            return ()
        texts = tuple(text + option for text in texts for option in options)
    return texts


def _few_characters(argument: Any) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for kind, value in argument:
        if kind is ops.LITERAL:
            found.append(bytes([value]))
        elif kind is ops.CATEGORY and value is ops.CATEGORY_DIGIT:
            found += [b"%d" % digit for digit in range(10)]
        else:
            return ()
    return tuple(found)
