"""Predictions beside what was measured: errors, verdicts, longest rows, and the residuals of the calibration half."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpofit.errors import BadInput
from dpofit.memory.limits import longest_prompt
from dpofit.memory.predict import Prediction, Residuals, predict
from score_cases import Measured, PlannedJob, Verdicted, planned

# Phases of a first step up to the one a measurement ends with.
_BEFORE_STEP = ("forward", "reference_forward", "loss", "backward", "accumulate")


@dataclass(frozen=True, slots=True)
class Scored:
    """A measured row and its prediction, in bytes."""

    case: Measured
    predicted: int
    low: int
    high: int
    planned: PlannedJob

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.case.value - 1


@dataclass(frozen=True, slots=True)
class ScoredLength:
    """Tokens of the longest row: where the verdict is still `fits`, what ran, and where it is not yet `oom`."""

    case: Measured
    fits: int
    not_oom: int

    @property
    def inside(self) -> bool:
        return self.fits <= self.case.value <= self.not_oom


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
        if case.kind == "longest":
            limit = longest_prompt(job.job)
            answer = job.job.lengths.chosen
            fits, not_oom = limit.prompt_tokens or 0, limit.not_oom_prompt_tokens or 0
            lengths.append(ScoredLength(case, answer + fits, answer + not_oom))
            continue
        prediction = predict(job.job, job.mix)
        predicted = _like_for_like(case, prediction)
        rows.append(Scored(case, predicted, prediction.gpu.low_bytes, prediction.gpu.high_bytes, job))
    return rows, lengths, left


def _like_for_like(case: Measured, prediction: Prediction) -> int:
    """What the case's tool would have shown: allocated against allocated, NVML against NVML."""
    gpu = prediction.gpu
    if case.until is not None:
        until = _BEFORE_STEP[: _BEFORE_STEP.index(case.until) + 1]
        return max(peak.size_bytes for name, peak in gpu.first_step.items() if name in until)
    return {"allocated": gpu.allocated_bytes, "reserved": gpu.reserved.peak_bytes, "nvml": gpu.peak_bytes}[case.kind]


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
    """The outermost relative errors (measured over predicted, less one) of the rows that calibrate; zero lies inside.
    Allocated rows give one range, reserved and NVML rows the other."""
    allocated = [row.case.value / row.predicted - 1 for row in rows if row.case.kind == "allocated"]
    reserved = [row.case.value / row.predicted - 1 for row in rows if row.case.kind != "allocated"]
    return Residuals(_range(allocated), _range(reserved), len(rows))


def _range(errors: Sequence[float]) -> tuple[float, float]:
    return round(min(0.0, *errors), 4), round(max(0.0, *errors), 4)
