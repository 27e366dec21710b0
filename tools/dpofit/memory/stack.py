"""`--stack`: pinned, 2024, or LIBRARY=VERSION pairs."""

from __future__ import annotations

import re
from dataclasses import fields, replace

from dpofit.errors import BadInput, Problem
from dpofit.memory.job import PINNED, STACK_2024, Stack

# 2.4, 4.48.0, 2.6.0rc1, 2.4.1+cu121 (PEP 440's usual forms)
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?(\+[a-z0-9.]+)?")
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
        if not equals or library not in libraries or not _VERSION.fullmatch(version):
            problems.append(Problem("command line", "--stack", f"{pair!r} is not known", right))
        elif library in versions:
            problems.append(Problem("command line", "--stack", f"names {library} twice", "Give each one version"))
        else:
            versions[library] = version
    if problems:
        raise BadInput(problems)
    return replace(PINNED, **versions)
