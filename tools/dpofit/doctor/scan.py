"""One streaming pass over a log that looks at few of its lines, since most are known to be dull by their letters.

A line's skeleton is its ASCII letters, lower case, and its spaces. Logs repeat: a gigabyte has a few thousand
skeletons. One set difference per block drops those seen before that hold nothing any pattern needs; new ones are
judged by their words, which repeat, too; only the rest meets regular expressions. Every pattern has literals without
which it can't match, and every literal has a word: nothing that could match is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO

from dpofit.doctor import lines
from dpofit.doctor.facts import LogFacts, Place
from dpofit.doctor.knowledge import Diagnosis, Phase, longest_word
from dpofit.doctor.probes import Probe, all_probes, keep_metrics
from dpofit.doctor.read import blocks

KEPT_DULL = 100_000  # skeletons remembered as dull, about 20 MB; then forgotten and learned again
KEPT_WATCHED = 20_000
KEPT_WORDS = 200_000
LOOKS = 512  # times that one skeleton is looked at: as many ranks may say the same
LOOKS_WITHOUT_PROBE = 2  # lines that are only telling: the first ones do
TORN_TRIES = 2_000  # per log
TORN_LETTERS = 100  # letters on each side of a line break that a broken literal can reach
NEARBY_BYTES = 2_048  # above a line, where its time is looked for
PROGRESS_BYTES = 65_536  # above a line, where the training bar is looked for: tracebacks of all ranks are long
KEPT_TELLING_FIRST = 4

# Lines worth showing when nothing is diagnosed: these words, as letters only and as they stand.
TELLING_WORDS = (b"error", b"exception", b"fatal", b"failed", b"killed", b"aborted", b"exitcode")
_TELLING = re.compile(rb"error|exception|fatal|failed|killed|aborted|core dumped|exit ?code", re.I)
_TRACEBACK_FRAME = re.compile(rb'^\S*\s*File "|^\S*\s+raise |Traceback \(most recent')

# What the log itself writes after a printed training example, which may hold anything.
_SAMPLE_ENDS = re.compile(
    rb"(?:^|[\r\n])(?:\[(?:INFO|WARNING|ERROR|rank\d|default\d|20\d\d-)|[IWE]\d{4} \d\d:"
    rb"|[\w ]{0,40}:? +\d+%\||\*{5} Running)"
)

_FOLD = bytes(byte + 32 if 65 <= byte <= 90 else 10 if byte == 13 else byte for byte in range(256))
_DROP = bytes(byte for byte in range(256) if byte not in b"\n\r " and not (byte < 128 and chr(byte).isalpha()))


@dataclass(slots=True)
class _Watched:
    """A skeleton that some pattern may match, or that is telling."""

    probes: tuple[Probe, ...]
    looks: int = 0

    @property
    def done(self) -> bool:
        return self.looks >= (LOOKS if self.probes else LOOKS_WITHOUT_PROBE)


@dataclass(frozen=True, slots=True)
class _Here:
    """A line within the block being read."""

    block: bytes
    start: int
    newlines: int  # of the block before it
    line: bytes  # without terminal escapes


class Scan:
    """Reads logs one after the other, keeping what it learned about dull lines."""

    def __init__(self, diagnoses: dict[str, Diagnosis]) -> None:
        self._by_literal: dict[bytes, list[Probe]] = {}
        for probe in all_probes(diagnoses):
            for literal in probe.literals:
                self._by_literal.setdefault(literal, []).append(probe)
        self._by_word: dict[bytes, list[bytes]] = {word: [] for word in TELLING_WORDS}
        for literal in self._by_literal:
            self._by_word.setdefault(longest_word(literal), []).append(literal)
        self._dull: set[bytes] = set()
        self._dull_words: set[bytes] = set()
        self._live_words: dict[bytes, tuple[list[bytes], bool]] = {}  # word of logs: literals it may be of, telling
        self._watched: dict[bytes, _Watched] = {}

    def read(self, name: str, stream: BinaryIO, on_bytes: Callable[[int], None] = lambda count: None) -> LogFacts:
        """One log to its end. Memory: a block, the skeletons, and the bounded lists of LogFacts."""
        facts = LogFacts(name)
        last = b""
        for block in blocks(stream):
            newlines = block.count(b"\n")
            self._block(block, newlines, facts)
            _leave_sample(block, len(block), facts)
            facts.size_bytes += len(block)
            facts.lines += newlines
            facts.before = (facts.before + block)[-NEARBY_BYTES:]
            facts.progress = lines.progress_of(block[-PROGRESS_BYTES:]) or facts.progress
            last = block
            on_bytes(len(block))
        facts.tail = _tail(last, facts)
        return facts

    def _block(self, block: bytes, newlines: int, facts: LogFacts) -> None:
        skeletons = block.translate(_FOLD, _DROP).split(b"\n")
        fresh = set(skeletons) - self._dull
        if fresh:
            self._learn(fresh)
            wanted = fresh & self._watched.keys()
            if wanted:
                self._look(block, skeletons, wanted, facts)
        _sample_metrics(block, newlines, facts)

    def _learn(self, fresh: set[bytes]) -> None:
        """Sorts new skeletons into dull and watched."""
        if len(self._watched) > KEPT_WATCHED:
            self._watched.clear()
        new = fresh - self._watched.keys()
        if len(self._dull) + len(new) > KEPT_DULL:
            self._dull.clear()
        self._dull |= new
        text = b"\n".join(new)
        live = self._live(set(text.split()))
        if not live:
            return
        candidates = dict.fromkeys(literal for literals, _ in live.values() for literal in literals)
        present = [literal for literal in candidates if literal in text]
        telling = [word for word, (_, tells) in live.items() if tells]
        for skeleton in new if present or telling else ():
            found = [literal for literal in present if literal in skeleton]
            if found or any(word in skeleton for word in telling):
                probes = dict.fromkeys(probe for literal in found for probe in self._by_literal[literal])
                self._watched[skeleton] = _Watched(tuple(probes))
                self._dull.discard(skeleton)

    def _live(self, words: set[bytes]) -> dict[bytes, tuple[list[bytes], bool]]:
        """Of the words of a text, those that may be part of a literal, or are telling."""
        unknown = words - self._dull_words - self._live_words.keys()
        if unknown:
            if len(self._dull_words) + len(unknown) > KEPT_WORDS:
                self._dull_words.clear()
            text = b" ".join(unknown)
            keys = [key for key in self._by_word if key in text]
            for word in unknown if keys else ():
                inside = [key for key in keys if key in word]
                if inside:
                    literals = [literal for key in inside for literal in self._by_word[key]]
                    self._live_words[word] = (literals, any(key in TELLING_WORDS for key in inside))
            self._dull_words |= unknown - self._live_words.keys()
            if len(self._live_words) > KEPT_WATCHED:
                kept = {word: self._live_words[word] for word in words & self._live_words.keys()}
                self._live_words = kept
        return {word: self._live_words[word] for word in words & self._live_words.keys()}

    def _look(self, block: bytes, skeletons: list[bytes], wanted: set[bytes], facts: LogFacts) -> None:
        segments = block.replace(b"\r", b"\n").split(b"\n")
        starts = accumulate((len(segment) + 1 for segment in segments), initial=0)
        counted, newlines = 0, 0
        for index, (skeleton, start) in enumerate(zip(skeletons, starts, strict=False)):
            if skeleton not in wanted:
                continue
            watched = self._watched.get(skeleton)
            if watched is None:  # done with, within this block
                continue
            newlines += block.count(b"\n", counted, start)
            counted = start
            _leave_sample(block, start + len(segments[index]), facts)
            here = _Here(block, start, newlines, lines.clean(segments[index]))
            if not _run(watched.probes, here, facts) and _TELLING.search(here.line):
                if watched.looks < LOOKS_WITHOUT_PROBE and index + 1 < len(segments):
                    self._torn(skeleton, skeletons[index + 1], segments[index + 1], here, facts)
                _keep_telling(here, facts)
            watched.looks += 1
            if watched.done:
                del self._watched[skeleton]
                self._dull.add(skeleton)

    def _torn(self, skeleton: bytes, next_skeleton: bytes, rest: bytes, here: _Here, facts: LogFacts) -> None:
        """A message broken in two by a line break: only patterns whose literal lies across the break are tried."""
        facts.torn_tries += 1
        if facts.torn_tries > TORN_TRIES or not next_skeleton:
            return
        head, tail = skeleton[-TORN_LETTERS:], next_skeleton[:TORN_LETTERS]
        joined = head + tail + b"\n" + head + b" " + tail.lstrip()
        across = [
            probes
            for literal, probes in self._by_literal.items()
            if literal in joined and literal not in head and literal not in tail
        ]
        rest = lines.clean(rest)
        for probe in dict.fromkeys(probe for probes in across for probe in probes):
            match = probe.pattern.search(here.line + rest) or probe.pattern.search(here.line + b" " + rest.lstrip())
            if match:
                probe.take(facts, _place(facts, here), match)


def _leave_sample(block: bytes, end: int, facts: LogFacts) -> None:
    """Forgets that a training example is being printed once a line of the log's own has followed it."""
    if facts.sample_at is not None and facts.sample_at < facts.size_bytes + end:
        begin = block.find(b"\n", max(0, facts.sample_at - facts.size_bytes))
        if facts.sample_at < facts.size_bytes:
            begin = 0
        if begin >= 0 and _SAMPLE_ENDS.search(block[begin:end]):
            facts.sample_at = None


def _run(probes: tuple[Probe, ...], here: _Here, facts: LogFacts) -> bool:
    place = None
    for probe in probes:
        if match := probe.pattern.search(here.line):
            place = place or _place(facts, here)
            probe.take(facts, place, match)
    return place is not None


def _place(facts: LogFacts, here: _Here) -> Place:
    """The line with what was going on: step, time and phase as last seen up to here."""
    before = here.block[max(0, here.start - NEARBY_BYTES) : here.start]
    if len(before) < NEARBY_BYTES:
        before = facts.before + before
    since = here.block[max(0, here.start - PROGRESS_BYTES) : here.start]
    facts.progress = lines.progress_of(since + here.line) or facts.progress
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


def _sample_metrics(block: bytes, newlines: int, facts: LogFacts) -> None:
    """Once metrics lines are dull, the last one of each block stands for the rest."""
    start = block.rfind(b"'loss': ")
    if start < 0:
        return
    start = max(block.rfind(b"\n", 0, start), block.rfind(b"\r", 0, start)) + 1
    if facts.metrics and facts.metrics[-1].place.offset >= facts.size_bytes + start:
        return
    end = block.find(b"\n", start)
    line = lines.clean(block[start : end if end >= 0 else len(block)])
    keep_metrics(facts, _place(facts, _Here(block, start, newlines - block.count(b"\n", start), line)))


def _tail(block: bytes, facts: LogFacts) -> list[Place]:
    """The last three lines of the log that say anything."""
    parts = block.split(b"\n")
    if not parts[-1]:
        parts.pop()
    last_line = facts.lines + (0 if block.endswith(b"\n") else 1)
    found: list[Place] = []
    for back, part in enumerate(reversed(parts[-50:])):
        text = lines.clean(part.rstrip(b"\r").rsplit(b"\r", 1)[-1][-lines.SEARCHED_BYTES :])
        if text.strip() and len(found) < 3:
            found.append(Place(facts.name, last_line - back, facts.size_bytes, text))
    return found[::-1]
