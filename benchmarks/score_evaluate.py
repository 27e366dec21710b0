"""Predictions beside what was measured: errors, verdicts, longest rows, and the residuals of the calibration half."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from score_cases import Measured, PlannedJob, Verdicted, planned

from dpofit.errors import BadInput
from dpofit.memory.predict import Prediction, Residuals, predict

# Phases of a first step up to the one a measurement ends with.
_BEFORE_STEP = ("forward", "reference_forward", "loss", "backward", "accumulate")


@dataclass(frozen=True, slots=True)
class Scored:
    """A measured row and its prediction, in bytes: the mean of the orders that its rows may have come in."""

    case: Measured
    predicted: int
    residual: float  # what `low` and `high` are widened by: measured over allocated or reserved bytes, less one
    low: int
    high: int
    planned: PlannedJob

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.case.value - 1


@dataclass(frozen=True, slots=True)
class ScoredLength:
    """The longest row that ran on a card, and what dpofit says of it."""

    case: Measured
    verdict: str
    low: int
    high: int
    capacity: int

    @property
    def right(self) -> bool:
        """A row that ran is not called `oom`."""
        return self.verdict != "oom"


@dataclass(frozen=True, slots=True)
class ScoredVerdict:
    """`outcome`: right, tight (neither), wrong."""

    case: Verdicted
    predicted: str
    low_bytes: int
    high_bytes: int
    capacity_bytes: int

    @property
    def outcome(self) -> str:
        if self.predicted == "tight":
            return "tight"
        return "right" if self.predicted == self.case.happened else "wrong"

    @property
    def false_fits(self) -> bool:
        return self.case.happened == "oom" and self.predicted == "fits"


@dataclass(frozen=True, slots=True)
class NotScored:
    """A row without a prediction, and why: the case's own reason, or what dpofit said when it refused the job."""

    group: str
    name: str
    reason: str


def score_measured(cases: Iterable[Measured]) -> tuple[list[Scored], list[ScoredLength], list[NotScored]]:
    """Rows with a prediction, longest rows, and the others with the reason."""
    rows, lengths, left = [], [], []
    for case in cases:
        if case.job is None:
            left.append(NotScored(case.group, case.name, case.excluded))
            continue
        job = planned(case.job)
        predictions = [predict(job.job, mix) for mix in job.mixes]
        if case.kind == "longest":
            (only,) = predictions
            gpu = only.gpu
            lengths.append(ScoredLength(case, only.gpu_verdict, gpu.low_bytes, gpu.high_bytes, gpu.capacity_bytes))
            continue
        rows.append(
            Scored(
                case,
                round(fmean(_like_for_like(case, one) for one in predictions)),
                fmean(_residual(case, one) for one in predictions),
                min(one.gpu.low_bytes for one in predictions),
                max(one.gpu.high_bytes for one in predictions),
                job,
            )
        )
    return rows, lengths, left


def _like_for_like(case: Measured, prediction: Prediction) -> int:
    """What the case's tool would have shown: allocated against allocated, NVML against NVML."""
    gpu = prediction.gpu
    if case.until is not None:
        until = _BEFORE_STEP[: _BEFORE_STEP.index(case.until) + 1]
        return max(peak.size_bytes for name, peak in gpu.first_step.items() if name in until)
    return {"allocated": gpu.allocated_bytes, "reserved": gpu.reserved.peak_bytes, "nvml": gpu.peak_bytes}[case.kind]


def _residual(case: Measured, prediction: Prediction) -> float:
    """NVML less context and communicators is held against reserved bytes, as `high` is made."""
    if case.kind != "nvml":
        return case.value / _like_for_like(case, prediction) - 1
    gpu = prediction.gpu
    return (case.value - gpu.overhead.total_bytes) / gpu.reserved.peak_bytes - 1


def score_verdicts(cases: Iterable[Verdicted]) -> tuple[list[ScoredVerdict], list[NotScored]]:
    """Cases that can be decided, and the others with the reason."""
    rows, left = [], []
    for case in cases:
        if case.job is None:
            kind = "undecidable" if case.undecidable else "out of scope"
            left.append(NotScored(kind, case.name, case.undecidable or case.out_of_scope))
            continue
        try:
            prediction = predict(planned(case.job).job)
        except BadInput as refusal:
            why = "; ".join(problem.wrong for problem in refusal.problems)
            left.append(NotScored("refused by dpofit", case.name, why))
            continue
        if case.side == "host":
            host, capacity = prediction.host, prediction.job.cluster.host_ram_bytes
            assert capacity is not None and prediction.host_verdict is not None
            rows.append(ScoredVerdict(case, prediction.host_verdict, host.low_bytes, host.high_bytes, capacity))
        else:
            gpu = prediction.gpu
            rows.append(ScoredVerdict(case, prediction.gpu_verdict, gpu.low_bytes, gpu.high_bytes, gpu.capacity_bytes))
    return rows, left


def calibrates(case: Measured) -> bool:
    """Does the row set the interval? The calibration half of those whose code is the code modelled."""
    return case.half == "calibration" and case.known_code and case.kind != "longest"


def calibrated(rows: Sequence[Scored]) -> Residuals:
    """The outermost residuals of the rows that calibrate; zero lies inside.
    Allocated rows give one range, reserved and NVML rows the other."""
    allocated = [row.residual for row in rows if row.case.kind == "allocated"]
    reserved = [row.residual for row in rows if row.case.kind != "allocated"]
    return Residuals(_range(allocated), _range(reserved), len(rows))


def _range(errors: Sequence[float]) -> tuple[float, float]:
    """Rounded outwards, to four digits."""
    return math.floor(min(0.0, *errors) * 1e4) / 1e4, math.ceil(max(0.0, *errors) * 1e4) / 1e4
