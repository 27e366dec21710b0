"""`--stack`: pinned, 2024, or LIBRARY=VERSION pairs."""

from __future__ import annotations

from dataclasses import fields, replace

from dpofit.errors import BadInput, Problem
from dpofit.memory.job import PINNED, STACK_2024, Stack

NAMED = {"pinned": PINNED, "2024": STACK_2024}


def parse_stack(text: str) -> Stack:
    """`pinned`, `2024`, or `transformers=4.48.0,torch=2.5.1` on top of pinned; BadInput lists what is unknown."""
    if text in NAMED:
        return NAMED[text]
    libraries = [field.name for field in fields(Stack)]
    right = f"Use pinned, 2024, or pairs such as transformers=4.48.0 of {', '.join(libraries)}"
    versions: dict[str, str] = {}
    problems = []
    for pair in text.split(","):
        library, equals, version = pair.strip().partition("=")
        if not equals or library not in libraries or not version[:1].isdigit():
            problems.append(Problem("command line", "--stack", f"{pair!r} is not known", right))
        else:
            versions[library] = version
    if problems:
        raise BadInput(problems)
    return replace(PINNED, **versions)
