"""The sieve finds what plain search finds; the fast pass says what every pattern tried on every line says."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpofit.doctor import scan, sieve
from dpofit.doctor.cause import report
from dpofit.doctor.knowledge import load
from dpofit.doctor.probes import Probe, all_probes
from dpofit.doctor.scan import Scan
from dpofit.doctor.sieve import SHORT_WORDS, Sieve

ROOT = Path(__file__).parents[2]
DIAGNOSES = load().diagnoses
TEXTS = sorted({literal for probe in all_probes(DIAGNOSES) for literal in probe.literals})
SIEVE = Sieve(TEXTS)
EXAMPLES = [
    text for each in DIAGNOSES.values() for text in (*each.examples.match, *each.examples.no_match)
]  # fmt: skip


class Thorough(Scan):
    """Tries every pattern on every line."""

    def _worth_a_look(self, block: bytes, is_telling: bool) -> tuple[dict[int, set[Probe]], set[int]]:
        _, telling = super()._worth_a_look(block, is_telling)
        starts = [0] + [at + 1 for at, byte in enumerate(block) if byte in b"\r\n"]
        return {start: set(self._order) for start in starts if start < len(block)}, telling


def said(reader: Scan, log: bytes) -> str:
    """All that the doctor would go by, as text: NaN equals NaN there."""
    facts = reader.read("a.log", io.BytesIO(log))
    told = report([facts], DIAGNOSES)
    events = sorted(facts.events, key=lambda event: (event.place.offset, event.diagnosis))
    contexts = sorted(facts.contexts.items())
    return "\n".join(map(repr, (*told.findings, *told.telling_lines, *events, *contexts, *facts.metrics, *facts.saves)))


@pytest.mark.parametrize("path", sorted((ROOT / "tests/fixtures/logs").glob("*.log")), ids=lambda path: path.stem)
def test_a_real_log_gets_the_same_findings_from_every_pattern_on_every_line(path: Path) -> None:
    log = path.read_bytes()
    assert said(Scan(DIAGNOSES), log) == said(Thorough(DIAGNOSES), log)


def test_all_examples_get_the_same_findings_from_every_pattern_on_every_line() -> None:
    cases = json.loads((ROOT / "benchmarks/cases/reports_logs.json").read_text(encoding="utf-8"))
    texts = [*EXAMPLES, *("\n".join(case["lines"]) for case in cases)]
    random.Random(4).shuffle(texts)
    log = "\n".join(texts).encode()
    assert said(Scan(DIAGNOSES), log) == said(Thorough(DIAGNOSES), log)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(TEXTS), st.binary(max_size=40)), max_size=20))
def test_every_text_is_found_wherever_it_lies(pieces: list[bytes]) -> None:
    block = b"".join(pieces)
    assert sorted(SIEVE.texts_in(block)) == [text for text in TEXTS if text in block]


@pytest.mark.parametrize("numpy_from_bytes", [0, 1 << 40])
def test_long_logs_are_read_with_numpy_and_short_ones_without(
    numpy_from_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sieve, "NUMPY_FROM_BYTES", numpy_from_bytes)
    reader = Sieve(TEXTS)
    for shift in range(16):
        for text in TEXTS[::7]:
            assert text in reader.texts_in(b"x" * shift + text + b"y" * 9)
    assert reader.texts_in(b"nothing of that kind " * 100) == []


def test_few_words_are_looked_for_by_themselves() -> None:
    """Each costs a pass over the log."""
    assert len(SHORT_WORDS) <= 4


def test_a_failure_in_the_middle_of_a_long_log_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BEGINNING_BYTES", 0)
    dull = b"step 1 of some work\n" * 60_000
    reader = Scan(DIAGNOSES)
    log = dull + b'Traceback (most recent call last):\n  File "a.py", line 1\nSomeError: nobody knows this\n' + dull
    facts = reader.read("a.log", io.BytesIO(log))
    assert [place.text for place in facts.telling_first] == [b"SomeError: nobody knows this"]
    facts = reader.read(
        "b.log", io.BytesIO(dull + b"foo: MemoryError\nOSError: [Errno 28] No space left on device\n" + dull)
    )
    assert {event.diagnosis for event in facts.events} == {"save.disk-full"}
    assert facts.events[0].place.line == 60_002


def test_the_newest_mark_counts_however_many_came_before() -> None:
    log = b"".join(b"Saving model checkpoint to out/checkpoint-%d\n" % step for step in range(2_000))
    facts = Scan(DIAGNOSES).read("a.log", io.BytesIO(log))
    assert facts.saves[-1].text == b"Saving model checkpoint to out/checkpoint-1999"
