"""Predictions beside what benchmarks/measure_gpu read on cards of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measure_gpu.jobs import planned
from measure_gpu.results import FOLDER, GpuResult, read_results
from measure_gpu.snapshot import allocator_events, read_record

from dpofit.errors import BadInput
from dpofit.memory.allocator import replay
from dpofit.memory.predict import Prediction, predict


@dataclass(frozen=True, slots=True)
class GpuScore:
    """A result and its prediction; None for one that ran on no card, or is refused (`why`)."""

    result: GpuResult
    prediction: Prediction | None
    why: str


@dataclass(frozen=True, slots=True)
class RecordScore:
    """torch's record of one run, replayed: reserved bytes as torch had them and as the replay has them."""

    name: str
    requests: int
    measured_bytes: int
    replayed_bytes: int


def score_results(folder: Path = FOLDER) -> list[GpuScore]:
    """Every result of `folder`, predicted for the batches and versions that ran."""
    return [_scored(result) for result in read_results(folder)]


def _scored(result: GpuResult) -> GpuScore:
    if result.card is None:
        return GpuScore(result, None, "ran without a card")
    rows = [tokens for _, tokens in result.batches]
    try:
        return GpuScore(result, predict(*planned(result.gpu_job, result.card.gpu, result.stack, rows)), "")
    except BadInput as refusal:
        return GpuScore(result, None, "; ".join(problem.wrong for problem in refusal.problems))


def score_records(folder: Path = FOLDER) -> Sequence[RecordScore]:
    """Every record of `folder`, through the replay that predictions use. Its name says how torch was set."""
    found = []
    for path in sorted(folder.glob("*.snapshot.json.gz")):
        record = read_record(path)
        expandable = "no-expandable" not in path.name
        run = replay(allocator_events(record), expandable=expandable)
        found.append(RecordScore(path.name, len(record.requests), record.reserved_peak_bytes, run.peak_reserved_bytes))
    return found
