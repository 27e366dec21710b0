"""What one pass over a log keeps: a bounded number of values, whatever the log's size."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dpofit.doctor.knowledge import Phase


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a log and what was going on there."""

    file: str
    line: int  # 1-based, counting \n as editors do
    offset: int  # bytes from the start of the log
    text: bytes  # without terminal escapes
    rank: int | None = None
    time: str | None = None  # MM-DD hh:mm:ss.ffffff of this line or the last one before it
    phase: Phase | None = None
    step: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A diagnosis whose pattern matched here."""

    diagnosis: str
    place: Place
    groups: dict[str, str]


@dataclass(frozen=True, slots=True)
class Metrics:
    """One logged record of a DPO trainer; None where the record has no such value."""

    place: Place
    loss: float | None
    grad_norm: float | None
    margin: float | None
    chosen: float | None
    rejected: float | None


@dataclass(frozen=True, slots=True)
class HostReading:
    """DeepSpeed's see_memory_usage line: host memory in use on this node, and its share of all."""

    place: Place
    used_gib: float
    percent: float


@dataclass(slots=True)
class LogFacts:
    """One log, read."""

    name: str
    size_bytes: int = 0
    lines: int = 0
    events: list[Event] = field(default_factory=list)
    contexts: dict[str, list[int]] = field(default_factory=dict)  # `before`, `unless`: where
    metrics: list[Metrics] = field(default_factory=list)
    readings: list[HostReading] = field(default_factory=list)
    launches: list[Place] = field(default_factory=list)  # a launcher started: a new run in the same log
    restarts: list[Place] = field(default_factory=list)  # torchrun restarted the workers of the same run
    starts: list[Place] = field(default_factory=list)  # the training loop began
    failures: list[Place] = field(default_factory=list)  # a launcher said that a rank failed
    node_ranks: list[tuple[Place, int, int]] = field(default_factory=list)  # where, number of nodes, node rank
    world_size: int | None = None
    saves: list[Place] = field(default_factory=list)
    done: list[Place] = field(default_factory=list)  # the training loop ended well
    telling_first: list[Place] = field(default_factory=list)
    telling_last: deque[Place] = field(default_factory=lambda: deque(maxlen=6))
    tail: list[Place] = field(default_factory=list)
    phase_mark: tuple[Phase, tuple[int, int] | None] | None = None  # the last marker and the step it came at
    progress: tuple[int, int] | None = None
    time: str | None = None
    before: bytes = b""  # the end of the block before
    torn_tries: int = 0
    sample_at: int | None = None  # offset of a printed training example whose end has not been seen
