"""What a scan looks for: every pattern of every diagnosis, and the marks that tell where a run was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from dpofit.doctor.facts import Event, HostReading, LogFacts, Metrics, Place
from dpofit.doctor.knowledge import Diagnosis, Phase
from dpofit.doctor.literals import required_literals

KEPT_EVENTS = 32
KEPT_METRICS = 4_096

# A phase begins at one of these lines and ends at the next mark, or when the training bar moves on.
PHASE_MARKS: tuple[tuple[Phase, str], ...] = (
    ("data", r"Running tokenizer on dataset|Converting format of dataset"),
    ("load", r"Loading checkpoint shards|Loading weights:|loading weights file|under default dtype torch"),
    ("init", r"Creating fp16 ZeRO|Creating BF16 optimizer|Loading extension module|DeepSpeedZeRoOffload initialize"),
    ("init", r"[Ii]nitializing optimizer states|Creating extension directory|Creating ZeRO Offload"),
    ("train", r"\*\*\*\*\* Running training \*\*\*\*\*"),
    ("eval", r"Running Evaluation \*\*\*\*\*|Running evaluation \*\*\*\*\*|Running Prediction \*\*\*\*\*"),
    ("save", r"Saving model checkpoint|\[Torch\] Saving |Saving the full checkpoint|Saving Torch Checkpoint"),
    ("save", r"_checkpoint\] zero checkpoint saved |\[Torch\] Checkpoint \S+ is ready"),
    ("done", r"'train_runtime': |  train_runtime  |Training completed\. Do not forget"),
)
LAUNCHED = r"Initializing \d+ distributed tasks at|Starting elastic_operator with launch configs"
RESTARTED = r"attempts left; will restart worker group"
METRICS = r"\{'loss': '?[-\dni]"
FAILED = r"failed \(exitcode: -?\d+\)|ChildFailedError|exits with return code = -?[1-9]"
NODE_RANK = r"training enabled: num nodes: (\d{1,6}), node rank: (\d{1,6})"
WORLD_SIZE = r"Process rank: \d+, world size: (\d{1,6}), device: "  # llamafactory 0.9.5 hparams/parser.py
SAMPLE = r"training example:$|(?:^|[\]:] ?)eval example:$"  # llamafactory 0.9.5 data/loader.py: then comes any text
HOST_READING = r"CPU Virtual Memory:\s+used = ([\d.]+) GB, percent = ([\d.]+)%"

Take = Callable[[LogFacts, Place, re.Match[bytes]], None]


compiled = cache(re.compile)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A regular expression, the literals without which it can't match, and what takes its match."""

    source: bytes
    literals: tuple[bytes, ...]
    take: Take
    needs_time: bool = True  # finding a line's time takes longer than all the rest

    @property
    def pattern(self) -> re.Pattern[bytes]:
        """Compiled at its first use: most patterns are never needed for a log."""
        return compiled(self.source)


def all_probes(diagnoses: dict[str, Diagnosis]) -> list[Probe]:
    """All patterns of all diagnoses, their `before` and `unless`, and the engine's own marks."""
    contexts = sorted({pattern for each in diagnoses.values() for pattern in (*each.before, *each.unless)})
    return [
        *_own_probes(),
        *(_probe(pattern, _event(each.id)) for each in diagnoses.values() for pattern in each.match),
        *(_probe(pattern, _context(pattern)) for pattern in contexts),
    ]


def _probe(pattern: str, take: Take, needs_time: bool = True) -> Probe:
    return Probe(pattern.encode(), required_literals(pattern), take, needs_time)


def _own_probes() -> Iterator[Probe]:
    for phase, pattern in PHASE_MARKS:
        yield _probe(pattern, _mark(phase))
    yield _probe(METRICS, lambda facts, place, match: keep_metrics(facts, place), needs_time=False)
    yield _probe(LAUNCHED, lambda facts, place, match: _keep(facts.launches, place))
    yield _probe(RESTARTED, lambda facts, place, match: _keep(facts.restarts, place))
    yield _probe(HOST_READING, _keep_reading)
    yield _probe(FAILED, lambda facts, place, match: _keep(facts.failures, place))
    yield _probe(NODE_RANK, _keep_node_rank)
    yield _probe(SAMPLE, _sample_begins)
    yield _probe(WORLD_SIZE, _keep_world_size)


def _keep(kept: list, value: object) -> None:
    """Appends; past KEPT_EVENTS the last one is replaced, so that first ones and the very last stay."""
    if len(kept) < KEPT_EVENTS:
        kept.append(value)
    else:
        kept[-1] = value


def _event(diagnosis: str) -> Take:
    def take(facts: LogFacts, place: Place, match: re.Match[bytes]) -> None:
        if facts.sample_at is not None:
            return
        if sum(event.diagnosis == diagnosis for event in facts.events) < KEPT_EVENTS:
            groups = {name: text.decode("utf-8", "replace") for name, text in match.groupdict().items() if text}
            facts.events.append(Event(diagnosis, place, groups))

    return take


def _context(pattern: str) -> Take:
    def take(facts: LogFacts, place: Place, match: re.Match[bytes]) -> None:
        _keep(facts.contexts.setdefault(pattern, []), place.offset)

    return take


def _mark(phase: Phase) -> Take:
    def take(facts: LogFacts, place: Place, match: re.Match[bytes]) -> None:
        step = None if place.step is None or place.steps is None else (place.step, place.steps)
        facts.phase_mark = (phase, step)
        if phase == "done":
            _keep(facts.done, place)
        elif phase == "save":
            _keep(facts.saves, place)
        elif phase == "train":
            _keep(facts.starts, place)

    return take


def _keep_reading(facts: LogFacts, place: Place, match: re.Match[bytes]) -> None:
    try:
        _keep(facts.readings, HostReading(place, float(match[1]), float(match[2])))
    except ValueError:  # "1.2.3": torn digits
        return


def _keep_node_rank(facts: LogFacts, place: Place, match: re.Match[bytes]) -> None:
    _keep(facts.node_ranks, (place, int(match[1]), int(match[2])))


def _keep_world_size(facts: LogFacts, place: Place, match: re.Match[bytes]) -> None:
    facts.world_size = int(match[1])


def _sample_begins(facts: LogFacts, place: Place, match: re.Match[bytes]) -> None:
    facts.sample_at = place.offset


_VALUE = r"'%s': '?(-?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))"
_VALUES = tuple(
    re.compile((_VALUE % key).encode())
    for key in ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "rewards/rejected")
)


def keep_metrics(facts: LogFacts, place: Place) -> None:
    """Keeps a logged record; past KEPT_METRICS every other one of the later half is dropped."""

    def value(pattern: re.Pattern[bytes]) -> float | None:
        match = pattern.search(place.text)
        try:
            return float(match[1]) if match else None
        except ValueError:  # a torn number
            return None

    if not any(key in place.text for key in (b"'epoch'", b"'grad_norm'", b"'rewards/")):
        return  # a loss somebody printed, not a Trainer's record
    facts.metrics.append(Metrics(place, *(value(pattern) for pattern in _VALUES)))
    if len(facts.metrics) > KEPT_METRICS:
        half = KEPT_METRICS // 2
        facts.metrics[half:] = facts.metrics[half::2]
