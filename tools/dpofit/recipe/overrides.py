"""`key=value` arguments after the recipe, as LLaMA-Factory reads them (OmegaConf.from_cli), merged over the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.recipe.yaml_file import parse_scalar

_STEP = re.compile(r"[^.\[\]]+")
COMMAND_LINE = "command line"


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`a.b=1 c=null d=[1,2]` → {"a": {"b": 1}, "c": None, "d": [1, 2]}; later ones win. BadInput lists all bad ones."""
    overrides: dict[str, Any] = {}
    problems = []
    for argument in arguments:
        path, separator, written = argument.partition("=")
        steps = _STEP.findall(path)
        if not separator or not steps or argument.startswith("-"):
            right = f"Write KEY=VALUE, such as {_suggestion(argument)}."
            problems.append(Problem(COMMAND_LINE, argument, "is not an override", right))
            continue
        try:
            value = parse_scalar(written)
        except ValueError as error:
            problems.append(Problem(COMMAND_LINE, argument, f"has a value that is not YAML: {error}", "Quote it."))
            continue
        for step in reversed(steps):
            value = {step: value}
        overrides = merge(overrides, value)
    if problems:
        raise BadInput(problems)
    return overrides


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge key by key, everything else (lists too) is replaced: OmegaConf.merge, which refuses a list for
    a mapping and the other way round."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            value = merge(under, value)
        elif (
            isinstance(under, (Mapping, list)) and isinstance(value, (Mapping, list)) and type(under) is not type(value)
        ):
            held, given = ("a mapping", "a list") if isinstance(under, Mapping) else ("a list", "a mapping")
            raise BadInput(Problem(COMMAND_LINE, key, f"is {given}, but the file holds {held}", f"Give {held}."))
        merged[key] = value
    return merged


def _suggestion(argument: str) -> str:
    words = argument.lstrip("-").replace(" ", "=", 1)
    key, separator, value = words.partition("=")
    return f"{key or 'cutoff_len'}={value if separator and _STEP.search(key) else 'VALUE'}"
