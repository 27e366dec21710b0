"""One streaming pass over a log that looks only at lines that some pattern may match.

Every pattern has texts without which it can't match; a sieve finds those in a block of log at once, however many lines
it has. The few lines that hold one meet the regular expressions. Lines that only look like failures are collected at
the beginning and the end of a log and below every traceback: that is where they tell something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from dpofit.doctor import lines
from dpofit.doctor.facts import LogFacts, Place
from dpofit.doctor.knowledge import Diagnosis, Phase
from dpofit.doctor.probes import Probe, all_probes
from dpofit.doctor.read import blocks
from dpofit.doctor.sieve import Sieve

LOOKS = 256  # lines of a log that are looked at for one text: as many ranks may say the same
LATER_LOOKS = 1  # and after those the last one of each block: the newest mark counts
TORN_TRIES = 500  # per log
TORN_BYTES = 100  # on each side of a line break that a broken literal can reach
NEARBY_BYTES = 2_048  # above a line, where its time is looked for
PROGRESS_BYTES = 65_536  # above a line, where the training bar is looked for: tracebacks of all ranks are long
BEGINNING_BYTES = 1 << 20  # and the last two blocks: where every telling line is noted
BELOW_TRACEBACK_BYTES = 8_192
KEPT_TELLING_FIRST = 4
KEPT_TELLING_ALIKE = 2  # lines with the same letters
KEPT_LETTERS = 1_000

# Lines worth showing when nothing is diagnosed: these words in any case.
TELLING_WORDS = (b"error", b"exception", b"fatal", b"failed", b"killed", b"aborted", b"core dumped", b"exit")
_TELLING = re.compile(rb"error|exception|fatal|failed|killed|aborted|core dumped|exit ?code", re.I)
_TRACEBACK = b"Traceback (most recent call last)"
_TRACEBACK_FRAME = re.compile(rb'^\S*\s*File "|^\S*\s+raise |Traceback \(most recent')
_NOT_LETTERS = bytes(byte for byte in range(256) if not (byte < 128 and chr(byte).isalpha()))

# What the log itself writes after a printed training example, which may hold anything.
_SAMPLE_ENDS = re.compile(
    rb"(?:^|[\r\n])(?:\[(?:INFO|WARNING|ERROR|rank\d|default\d|20\d\d-)|[IWE]\d{4} \d\d:"
    rb"|[\w ]{0,40}:? +\d+%\||\*{5} Running)"
)


@dataclass(frozen=True, slots=True)
class _Here:
    """A line within the block being read."""

    block: bytes
    start: int
    newlines: int  # of the block before it
    line: bytes


class Scan:
    """Reads logs one after the other, `known_bytes` or more of them."""

    def __init__(self, diagnoses: dict[str, Diagnosis], known_bytes: int = 0) -> None:
        self._by_literal: dict[bytes, list[Probe]] = {_TRACEBACK: []}
        self._order: dict[Probe, int] = {}  # of two patterns of a diagnosis the first that matches names the groups
        for number, probe in enumerate(all_probes(diagnoses)):
            self._order[probe] = number
            for literal in probe.literals:
                self._by_literal.setdefault(literal, []).append(probe)
        self._sieve = Sieve(self._by_literal, known_bytes)
        self._looks: dict[bytes, int] = {}
        self._letters: dict[bytes, int] = {}  # of telling lines, and how many of them there were

    def read(self, name: str, stream: BinaryIO, on_bytes: Callable[[int], None] = lambda count: None) -> LogFacts:
        """One log to its end. Memory: three blocks and the bounded lists of LogFacts."""
        facts = LogFacts(name)
        self._looks, self._letters = {}, {}
        block = b""
        for raw, is_last in _with_last(blocks(stream)):
            block = lines.plain(raw)
            newlines = self._block(block, facts, is_last or facts.size_bytes < BEGINNING_BYTES)
            _leave_sample(block, len(block), facts)
            facts.size_bytes += len(raw)  # offsets within a block with colours are a little low: their order is kept
            facts.lines += newlines
            facts.before = (facts.before + block[-NEARBY_BYTES:])[-NEARBY_BYTES:]
            facts.progress = lines.progress_of(block[-PROGRESS_BYTES:]) or facts.progress
            on_bytes(len(raw))
        facts.tail = _tail(block, facts)
        return facts

    def _block(self, block: bytes, facts: LogFacts, is_telling: bool) -> int:
        """Looks at one block; returns its line breaks."""
        probes, telling = self._worth_a_look(block, is_telling)
        counted, newlines = 0, 0
        for start in sorted(probes.keys() | telling):
            newlines += block.count(b"\n", counted, start)
            counted = start
            end = _line_end(block, start)
            _leave_sample(block, end, facts)
            here = _Here(block, start, newlines, block[start : min(end, start + lines.SEARCHED_BYTES)])
            found = sorted(probes.get(start, ()), key=self._order.__getitem__)
            if not _run(found, here, facts) and start in telling and _TELLING.search(here.line):
                self._note_telling(here, end, facts)
        return newlines + block.count(b"\n", counted)

    def _worth_a_look(self, block: bytes, is_telling: bool) -> tuple[dict[int, set[Probe]], set[int]]:
        """Where lines begin that some probes may match, with those probes; and lines that may be telling."""
        bounded = b"".join((b"\n", block, b"\n"))  # what a line's beginning and end are found by
        probes: dict[int, set[Probe]] = {}
        telling: set[int] = set()
        if is_telling:
            telling |= _telling_lines(block, 0, len(block))
        for literal in self._sieve.texts_in(bounded):
            for start in self._lines_with(literal, bounded):
                probes.setdefault(start, set()).update(self._by_literal[literal])
                if literal is _TRACEBACK and not is_telling:
                    telling |= _telling_lines(block, start, start + BELOW_TRACEBACK_BYTES)
        return probes, telling

    def _lines_with(self, literal: bytes, bounded: bytes) -> Iterator[int]:
        """Where the lines of the block inside `bounded` begin that hold the literal: the first LOOKS of the log."""
        at = bounded.find(literal)
        while at >= 0 and self._looks.get(literal, 0) < LOOKS:
            self._looks[literal] = self._looks.get(literal, 0) + 1
            start = _line_start(bounded, at + 1)
            yield start - 1
            at = bounded.find(literal, _line_end(bounded, start))
        end = len(bounded)
        for _ in range(LATER_LOOKS if at >= 0 else 0):
            last = bounded.rfind(literal, at, end)
            if last < 0:
                return
            start = _line_start(bounded, last + 1)
            yield start - 1
            end = start

    def _note_telling(self, here: _Here, end: int, facts: LogFacts) -> None:
        letters = here.line.translate(None, _NOT_LETTERS)
        if len(self._letters) > KEPT_LETTERS:
            self._letters.clear()
        self._letters[letters] = self._letters.get(letters, 0) + 1
        if self._letters[letters] > KEPT_TELLING_ALIKE:
            return
        if end + 1 < len(here.block):
            self._torn(here, here.block[end + 1 : _line_end(here.block, end + 1)], facts)
        _keep_telling(here, facts)

    def _torn(self, here: _Here, rest: bytes, facts: LogFacts) -> None:
        """A message broken in two by a line break: only patterns whose literal lies across the break are tried."""
        facts.torn_tries += 1
        if facts.torn_tries > TORN_TRIES or not rest:
            return
        head, tail = here.line[-TORN_BYTES:], rest[:TORN_BYTES]
        joined = head + tail + b"\n" + head + b" " + tail.lstrip()
        across = [
            probes
            for literal, probes in self._by_literal.items()
            if literal in joined and literal not in head and literal not in tail
        ]
        rest = rest[: lines.SEARCHED_BYTES]
        for probe in dict.fromkeys(probe for probes in across for probe in probes):
            match = probe.pattern.search(here.line + rest) or probe.pattern.search(here.line + b" " + rest.lstrip())
            if match:
                probe.take(facts, _place(facts, here), match)


def _with_last(stream: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The blocks, the last two as one, and whether it is that one."""
    held: list[bytes] = []
    for block in stream:
        if len(held) == 2:
            yield held.pop(0), False
        held.append(block)
    if held:
        yield b"".join(held), True


def _telling_lines(block: bytes, begin: int, end: int) -> set[int]:
    """Where the lines begin that hold one of TELLING_WORDS, between two places of the block."""
    part = block[begin:end].lower()
    found: set[int] = set()
    for word in TELLING_WORDS:
        at = part.find(word)
        while at >= 0:
            found.add(_line_start(block, begin + at))
            at = part.find(word, max(at + 1, _line_end(part, at)))
    return found


def _line_start(text: bytes, at: int) -> int:
    start = text.rfind(b"\n", 0, at) + 1
    return max(start, text.rfind(b"\r", start, at) + 1)


def _line_end(text: bytes, at: int) -> int:
    end = text.find(b"\n", at)
    end = len(text) if end < 0 else end
    earlier = text.find(b"\r", at, end)
    return end if earlier < 0 else earlier


def _leave_sample(block: bytes, end: int, facts: LogFacts) -> None:
    """Forgets that a training example is being printed once a line of the log's own has followed it."""
    if facts.sample_at is not None and facts.sample_at < facts.size_bytes + end:
        begin = block.find(b"\n", max(0, facts.sample_at - facts.size_bytes))
        if facts.sample_at < facts.size_bytes:
            begin = 0
        if begin >= 0 and _SAMPLE_ENDS.search(block[begin:end]):
            facts.sample_at = None


def _run(probes: Sequence[Probe], here: _Here, facts: LogFacts) -> bool:
    matches = [(probe, match) for probe in probes if (match := probe.pattern.search(here.line))]
    if matches:
        place = _place(facts, here, any(probe.needs_time for probe, _ in matches))
        for probe, match in matches:
            probe.take(facts, place, match)
    return bool(matches)


def _place(facts: LogFacts, here: _Here, needs_time: bool = True) -> Place:
    """The line with what was going on: step, time and phase as last seen up to here."""
    since = here.block[max(0, here.start - PROGRESS_BYTES) : here.start]
    facts.progress = lines.progress_of(since + here.line) or facts.progress
    if needs_time:
        before = here.block[max(0, here.start - NEARBY_BYTES) : here.start]
        if len(before) < NEARBY_BYTES:
            before = facts.before + before
        facts.time = lines.time_of(here.line) or lines.time_before(before) or facts.time
    return Place(
        file=facts.name,
        line=facts.lines + here.newlines + 1,
        offset=facts.size_bytes + here.start,
        text=here.line,
        rank=lines.rank_of(here.line),
        time=facts.time,
        phase=_phase(facts),
        step=facts.progress[0] if facts.progress else None,
        steps=facts.progress[1] if facts.progress else None,
    )


def _phase(facts: LogFacts) -> Phase | None:
    """The phase of the last mark; it is over when the training bar has moved past where it was at that mark."""
    if facts.phase_mark is None:
        return "train" if facts.progress else None
    phase, began_at = facts.phase_mark
    if phase == "done" or facts.progress is None:
        return phase
    moved_on = began_at is None or (facts.progress[1] == began_at[1] and facts.progress[0] > began_at[0])
    return "train" if moved_on else phase


def _keep_telling(here: _Here, facts: LogFacts) -> None:
    if _TRACEBACK_FRAME.search(here.line):
        return
    place = Place(facts.name, facts.lines + here.newlines + 1, facts.size_bytes + here.start, here.line)
    if len(facts.telling_first) < KEPT_TELLING_FIRST:
        facts.telling_first.append(place)
    else:
        facts.telling_last.append(place)


def _tail(block: bytes, facts: LogFacts) -> list[Place]:
    """The last three lines of the log that say anything."""
    parts = block.split(b"\n")
    if not parts[-1]:
        parts.pop()
    last_line = facts.lines + (0 if block.endswith(b"\n") else 1)
    found: list[Place] = []
    for back, part in enumerate(reversed(parts[-50:])):
        text = part.rstrip(b"\r").rsplit(b"\r", 1)[-1][-lines.SEARCHED_BYTES :]
        if text.strip() and len(found) < 3:
            found.append(Place(facts.name, last_line - back, facts.size_bytes, text))
    return found[::-1]
