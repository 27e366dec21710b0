"""The diagnoses as data: one YAML file each, schema-checked on load, with the literals a scan can look for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from dpofit.doctor.literals import required_literals
from dpofit.doctor.sieve import WINDOW_BYTES, is_short
from dpofit.errors import BadInput, Problem
from dpofit.findings import Severity

FOLDER = Path(__file__).parent / "diagnoses"
Phase = Literal["load", "data", "init", "train", "eval", "save", "done"]
PHASES: tuple[Phase, ...] = ("load", "data", "init", "train", "eval", "save", "done")
KINDS = ("memory", "save", "launch", "data", "config")


@dataclass(frozen=True, slots=True)
class Examples:
    """Log snippets, each run through the whole doctor by the tests and printed in docs/diagnoses.md."""

    match: tuple[str, ...]
    no_match: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One known failure. `match` are regular expressions on one line; any of them is enough.

    `{name}` in title and cause is filled from the match's named groups or by the check.
    """

    id: str
    severity: Severity
    title: str
    cause: str
    fix: str
    sources: tuple[str, ...]
    examples: Examples
    match: tuple[str, ...] = ()
    # cause: can be the root. consequence: something else died first; reported only when nothing better is known.
    # advice: true and worth saying, but not why a run ended.
    role: Literal["cause", "consequence", "advice"] = "cause"
    phase: tuple[Phase, ...] = ()  # only in these phases of the run, () in any
    before: tuple[str, ...] = ()  # one of these must stand in the same log, at most BEFORE_LINES above
    unless: tuple[str, ...] = ()  # and none of these anywhere in the logs
    check: str = ""  # a function of checks.py that decides on the numbers
    refines: tuple[str, ...] = ()  # less specific diagnoses of the same event, dropped beside this one
    explains: tuple[str, ...] = ()  # other diagnoses that follow from this one, even when they come first
    left_by_earlier_run: bool = False  # often the remains of an earlier run's failure in the same log


@dataclass(frozen=True, slots=True)
class Knowledge:
    """All diagnoses, by id."""

    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)


@cache
def load(folder: Path = FOLDER) -> Knowledge:
    """Reads and checks every file. Raises BadInput with all problems of all files."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    problems: list[Problem] = []
    found: dict[str, Diagnosis] = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            raw = yaml.load(path.read_bytes(), Loader=loader)
        except yaml.YAMLError as error:
            problems.append(Problem(str(path), None, f"not YAML: {error}", ""))
            continue
        diagnosis = _checked(path, raw, problems)
        if diagnosis:
            found[diagnosis.id] = diagnosis
    for diagnosis in found.values():
        for key in ("refines", "explains"):
            for other in getattr(diagnosis, key):
                if other not in found:
                    problems.append(Problem(diagnosis.id, key, f"names no diagnosis: {other}", ""))
    if problems:
        raise BadInput(problems)
    return Knowledge(found)


def _checked(path: Path, raw: Any, problems: list[Problem]) -> Diagnosis | None:
    """One file as a Diagnosis, or None after adding what is wrong with it to `problems`."""
    before = len(problems)

    def wrong(key: str | None, what: str, right: str = "") -> None:
        problems.append(Problem(str(path), key, what, right))

    if not isinstance(raw, dict):
        wrong(None, "not a mapping")
        return None
    known = {each.name: each for each in fields(Diagnosis)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            wrong(str(key), "unknown key", f"One of: {', '.join(known)}")
        elif key == "examples":
            good = isinstance(value, dict) and set(value) == {"match", "no_match"}
            if good and all(_texts(value[name]) for name in value):
                values[key] = Examples(tuple(value["match"]), tuple(value["no_match"]))
            else:
                wrong(key, "must have match and no_match, each a list of one or more log snippets")
        elif key in ("match", "before", "unless", "sources", "refines", "explains", "phase"):
            if not _texts(value):
                wrong(key, "must be a list of one or more texts")
            else:
                values[key] = tuple(value)
        elif key == "left_by_earlier_run":
            values[key] = value is True
        elif not isinstance(value, str) or not value.strip():
            wrong(key, "must be a text")
        else:
            values[key] = " ".join(value.split())
    for key in ("id", "severity", "title", "cause", "fix", "sources", "examples"):
        if key not in values:
            wrong(key, "is missing or wrong")
    if values.get("severity", "error") not in ("error", "warning", "info"):
        wrong("severity", "must be error, warning or info")
    if values.get("role", "cause") not in ("cause", "consequence", "advice"):
        wrong("role", "must be cause, consequence or advice")
    for phase in values.get("phase", ()):
        if phase not in PHASES:
            wrong("phase", f"no such phase: {phase}", f"One of: {', '.join(PHASES)}")
    name = values.get("id", "")
    if name and (name.split(".")[0] not in KINDS or path.stem != name):
        wrong("id", f"must be the file's name and start with one of {', '.join(KINDS)}")
    if not values.get("match") and not values.get("check"):
        wrong("match", "needs match or check")
    return Diagnosis(**values) if len(problems) == before else None


def pattern_problems(diagnosis: Diagnosis) -> list[Problem]:
    """What is wrong with its regular expressions. Not asked on every start: the files are the package's own."""
    problems = []
    for key in ("match", "before", "unless"):
        for pattern in getattr(diagnosis, key):
            try:
                re.compile(pattern.encode())
            except re.error as error:
                problems.append(Problem(diagnosis.id, key, f"not a regular expression ({error}): {pattern}", ""))
                continue
            for literal in required_literals(pattern) or (b"",):
                if len(literal) < WINDOW_BYTES and not is_short(literal):
                    wrong = f"needs {WINDOW_BYTES} bytes that every match has, not {literal!r}: {pattern}"
                    problems.append(Problem(diagnosis.id, key, wrong, ""))
                    break
    return problems


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
