"""Writes docs/diagnoses.md and the doctor's literals.json from the diagnosis files; --check only says whether they are
up to date (exit 1 if not)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Compare instead of writing.")
    arguments = parser.parse_args()
    diagnoses = load().diagnoses
    wanted = {PAGE: page(diagnoses.values()), TABLE: table(diagnoses)}
    if arguments.check:
        old = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        for path in wanted:
            print(f"{path.name} is {'old: run scripts/render_diagnoses.py' if path in old else 'up to date'}")
        return 1 if old else 0
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
