"""Writes docs/diagnoses.md and the doctor's literals.json from the diagnosis files; --check only says whether they are
up to date (exit 1 if not)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from generated import parser, write_or_check

from dpofit.doctor.knowledge import KINDS, Diagnosis, load
from dpofit.doctor.literals import TABLE, derived_literals
from dpofit.doctor.probes import all_probes

PAGE = Path(__file__).parent.parent / "docs" / "diagnoses.md"
HEADINGS = {
    "memory": "Memory, on the GPU and on the host",
    "save": "Saving, loading and resuming",
    "launch": "Launching, nodes and networks",
    "data": "Data and what the numbers say",
    "config": "Configuration and versions",
}
ROLES = {
    "cause": "",
    "consequence": " Follows from another failure; reported only when that one is in none of the logs.",
    "advice": " A remark: it does not end a run.",
}


def page(diagnoses: Iterable[Diagnosis]) -> str:
    """The whole page as Markdown."""
    known = list(diagnoses)
    lines = [
        "# What `dpofit doctor` knows",
        "",
        f"{len(known)} diagnoses, generated from `tools/dpofit/doctor/diagnoses/*.yaml` by "
        "`scripts/render_diagnoses.py`. `{…}` is filled from the log. Every example is run by the tests.",
    ]
    for kind in KINDS:
        lines += ["", f"## {HEADINGS[kind]}"]
        for each in sorted(known, key=lambda diagnosis: diagnosis.id):
            if each.id.startswith(f"{kind}."):
                lines += ["", *_entry(each)]
    return "\n".join(lines) + "\n"


def _entry(each: Diagnosis) -> list[str]:
    lines = [f"### `{each.id}`", "", f"**{each.title}** ({each.severity}){ROLES[each.role]}", ""]
    if each.phase:
        lines += [f"Only in these phases: {', '.join(each.phase)}.", ""]
    lines += [f"- Why: {each.cause}", f"- Fix: {each.fix}", f"- Sources: {'; '.join(each.sources)}"]
    lines += ["", "```text", *each.examples.match[0].rstrip("\n").replace("\x1b", "").splitlines()[:8], "```"]
    return lines


def table(diagnoses: dict[str, Diagnosis]) -> str:
    """Every pattern with the texts to look for, as JSON."""
    patterns = sorted({probe.source.decode() for probe in all_probes(diagnoses)})
    texts = {pattern: [text.decode("latin-1") for text in derived_literals(pattern)] for pattern in patterns}
    return json.dumps(texts, indent=0) + "\n"


def main() -> int:
    check: bool = parser(__doc__).parse_args().check
    diagnoses = load().diagnoses
    return write_or_check({PAGE: page(diagnoses.values()), TABLE: table(diagnoses)}, check)


if __name__ == "__main__":
    sys.exit(main())
