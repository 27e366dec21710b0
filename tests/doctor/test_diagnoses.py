"""Every diagnosis file is well formed, documented, and does what its examples say."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dpofit.doctor.checks import EVENT_CHECKS, LOGS_CHECKS
from dpofit.doctor.health import HEALTH_CHECKS
from dpofit.doctor.knowledge import FOLDER, load, pattern_problems
from dpofit.doctor.literals import derived_literals
from dpofit.doctor.probes import all_probes
from dpofit.errors import BadInput
from tests.doctor.conftest import ids, several_logs

ROOT = Path(__file__).parents[2]
DIAGNOSES = load().diagnoses
MATCH = [(each.id, text) for each in DIAGNOSES.values() for text in each.examples.match]
NO_MATCH = [(each.id, text) for each in DIAGNOSES.values() for text in each.examples.no_match]


def test_every_file_is_a_diagnosis() -> None:
    assert len(DIAGNOSES) == len(list(FOLDER.glob("*.yaml"))) > 100


@pytest.mark.parametrize(("name", "text"), MATCH)
def test_examples_that_must_match_do(name: str, text: str) -> None:
    found = ids(*several_logs(text))
    assert name in found
    if DIAGNOSES[name].role != "advice":
        assert found[0] == name


@pytest.mark.parametrize(("name", "text"), NO_MATCH)
def test_examples_that_must_not_match_do_not(name: str, text: str) -> None:
    assert name not in ids(*several_logs(text))


def test_every_check_that_a_file_names_exists() -> None:
    known = {**EVENT_CHECKS, **LOGS_CHECKS, **HEALTH_CHECKS}
    assert {each.check for each in DIAGNOSES.values() if each.check} <= known.keys()


def test_no_check_is_without_a_file() -> None:
    known = {**EVENT_CHECKS, **LOGS_CHECKS, **HEALTH_CHECKS}
    assert known.keys() <= {each.check for each in DIAGNOSES.values()}


def test_every_log_that_a_file_gives_as_source_is_there() -> None:
    sources = [source for each in DIAGNOSES.values() for source in each.sources if source.startswith("tests/")]
    assert sources
    assert [source for source in sources if not (ROOT / source).is_file()] == []


def test_a_pattern_matches_only_lines_that_hold_one_of_its_literals() -> None:
    """What lets the scan skip lines: checked on every line of every example, for every pattern."""
    lines = {line.encode() for _, text in MATCH + NO_MATCH for line in text.splitlines()}
    matches = 0
    for probe in all_probes(DIAGNOSES):
        for line in lines:
            if probe.pattern.search(line):
                matches += 1
                assert any(literal in b"\n" + line + b"\n" for literal in probe.literals), (probe.pattern, line)
    assert matches > 300


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        (r"got signal: 15\b", (b"got signal: 15",)),
        (r"(?:CUDA|NPU) memory", (b"CUDA memory", b"NPU memory")),
        (r"Kill(?:ed)? process", (b"Kill process", b"Killed process")),
        (r"Exceeded (?:job|step) memory limit", (b"Exceeded job memory limit", b"Exceeded step memory limit")),
        (r"step \d+ of very many steps", (b" of very many steps",)),
        (r"task \d+: Out Of Memory", (b": Out Of Memory",)),
        (r"[Ee]rror building it", (b"rror building it",)),
        (r"^eval example:$", (b"\neval example:\n", b"\neval example:\r", b"\reval example:\n", b"\reval example:\r")),
        (r"a\s+word", (b"word",)),
        (r".*", ()),
        (r"(?:left|right)", (b"left", b"right")),
        (r"(?:left.*|right.+)x", (b"left", b"right")),
        (r"(?:left)?", ()),
        (r"(?i)any case will do here", ()),
    ],
)
def test_literals_that_every_match_has(pattern: str, literals: tuple[bytes, ...]) -> None:
    assert derived_literals(pattern) == literals


def test_every_pattern_compiles_and_has_a_text_to_look_for() -> None:
    assert [problem for each in DIAGNOSES.values() for problem in pattern_problems(each)] == []


def test_a_pattern_without_a_text_to_look_for_is_named() -> None:
    bad = replace(DIAGNOSES["launch.sighup"], match=("(", r"\d+ ab"))
    assert [problem.wrong.split(":")[0] for problem in pattern_problems(bad)] == [
        "not a regular expression (missing ), unterminated subpattern at position 0)",
        "needs 15 bytes that every match has, not b'0 ab'",
    ]


def test_a_broken_file_is_refused_with_all_its_problems(tmp_path: Path) -> None:
    (tmp_path / "launch.odd.yaml").write_text("id: launch.even\nseverity: bad\nmatch: ['(', 'ab']\nwhatever: 1\n")
    with pytest.raises(BadInput) as refused:
        load(tmp_path)
    said = "\n".join(str(problem) for problem in refused.value.problems)
    for part in ("whatever: unknown key", "title: is missing", "severity: must be", "must be the file's name"):
        assert part in said


def test_patterns_cannot_run_away() -> None:
    """No repeat without bound inside a repeat, and at most one unbounded dot a pattern: time stays linear."""
    patterns = [pattern for each in DIAGNOSES.values() for pattern in (*each.match, *each.before, *each.unless)]
    nested = [pattern for pattern in patterns if re.search(r"[*+}]\)[*+{]", pattern)]
    unbounded = [pattern for pattern in patterns if re.search(r"\.[*+]", pattern)]
    assert nested == unbounded == []


def test_the_page_of_diagnoses_and_the_table_of_literals_are_up_to_date() -> None:
    script = ROOT / "scripts" / "render_diagnoses.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
