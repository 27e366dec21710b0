"""From what the logs hold to the one thing that went wrong first, and what only followed from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dpofit.doctor import lines
from dpofit.doctor.checks import EVENT_CHECKS, LOGS_CHECKS, Details, when
from dpofit.doctor.facts import Event, LogFacts, Place
from dpofit.doctor.health import HEALTH_CHECKS
from dpofit.doctor.knowledge import Diagnosis
from dpofit.findings import Evidence, Finding

BEFORE_BYTES = 64 << 10  # `before` patterns must stand within this much of log above the match
LONG_BEFORE_SECONDS = 60  # a "consequence" that came this much earlier did not follow from the later failure
MOVED_ON_STEPS = 1  # ranks go in step: one that fails stops all within a step
SHOWN_EVIDENCE = 3
SHOWN_TELLING = 10
_RAISE = re.compile(rb"^\S*\s+raise \w")


@dataclass(frozen=True, slots=True)
class Case:
    """A diagnosis that holds: the event, what fills its texts, and which run of its log it belongs to."""

    diagnosis: Diagnosis
    event: Event
    details: Details
    log: int
    run: int


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor says. `followed` are diagnoses that only follow from the first finding."""

    findings: tuple[Finding, ...]
    root: Event | None
    followed: tuple[Evidence, ...]
    telling_lines: tuple[Evidence, ...]
    logs: tuple[LogFacts, ...]


def report(logs: Sequence[LogFacts], diagnoses: dict[str, Diagnosis]) -> Report:
    """The first root cause, then true remarks that did not end the run; or nothing but telling lines."""
    cases = _holding(logs, diagnoses)
    root = _root(cases, logs)
    health = _health(logs, diagnoses)
    advice = [case for case in cases if case.diagnosis.role == "advice" and _in_last_run(case, logs)]
    advice = list({case.diagnosis.id: case for case in reversed(advice)}.values())[::-1]
    findings = [_finding(case, cases, logs) for case in ([root] if root else []) + health + advice]
    if len(findings) > 1:  # "normal in step 1" is worth saying only when there is nothing else to say
        findings = [finding for finding in findings if finding.id != "data.loss-at-start"]
    followed = [
        Evidence(_where(case.event.place), f"{case.diagnosis.id}: {lines.shown(case.event.place.text)}")
        for case in _first_of_each(cases)
        if root and case.diagnosis.role != "advice" and case.diagnosis.id != root.diagnosis.id and case.run == root.run
    ]
    telling = () if findings else _telling(logs)
    return Report(tuple(findings), root.event if root else None, tuple(followed), telling, tuple(logs))


def _holding(logs: Sequence[LogFacts], diagnoses: dict[str, Diagnosis]) -> list[Case]:
    """Events whose conditions hold, without those that a more specific one of the same line replaces."""
    seen = {pattern for log in logs for pattern in log.contexts}
    cases: list[Case] = []
    for number, log in enumerate(logs):
        for event in log.events:
            diagnosis = diagnoses[event.diagnosis]
            if diagnosis.phase and event.place.phase not in diagnosis.phase:
                continue
            if diagnosis.before and not _stands_before(log, diagnosis.before, event.place.offset):
                continue
            if any(pattern in seen for pattern in diagnosis.unless):
                continue
            check = EVENT_CHECKS.get(diagnosis.check)
            details = check(event, log) if check else {}
            if details is None:
                continue
            run = sum(launch.offset < event.place.offset for launch in log.launches)
            cases.append(Case(diagnosis, event, {**when(event), **event.groups, **details}, number, run))
    replaced = {(case.log, case.event.place.offset, less) for case in cases for less in case.diagnosis.refines}
    cases = [case for case in cases if (case.log, case.event.place.offset, case.diagnosis.id) not in replaced]
    return cases + _over_all_logs(logs, diagnoses)


def _over_all_logs(logs: Sequence[LogFacts], diagnoses: dict[str, Diagnosis]) -> list[Case]:
    found = []
    for diagnosis in diagnoses.values():
        check = LOGS_CHECKS.get(diagnosis.check)
        seen = check(logs) if check else None
        if seen:
            number, event = seen
            found.append(Case(diagnosis, event, {**when(event), **event.groups}, number, len(logs[number].launches)))
    return found


def _stands_before(log: LogFacts, patterns: Sequence[str], offset: int) -> bool:
    return any(
        offset - BEFORE_BYTES <= seen <= offset for pattern in patterns for seen in log.contexts.get(pattern, ())
    )


def _root(cases: Sequence[Case], logs: Sequence[LogFacts]) -> Case | None:
    """The first cause of the last run, or what is left when all else follows from something not in the logs."""
    cases = [case for case in cases if case.diagnosis.role != "advice" and not _recovered(case, logs)]
    explaining = [case for case in _first_of_each_log(cases) if case.diagnosis.explains]
    cases = [case for case in cases if not any(_explains(other, case) for other in explaining)]
    current = [case for case in cases if _in_last_run(case, logs)]
    if not any(case.diagnosis.role == "cause" and not case.diagnosis.left_by_earlier_run for case in current):
        # nothing, a mere consequence, or the remains of an earlier run: the cause may stand further up
        if not current:
            return None
        earlier = [case for case in cases if case.diagnosis.role == "cause" and case not in current]
        current += [case for case in earlier if case.run == max(other.run for other in earlier)]
    causes = [case for case in current if case.diagnosis.role == "cause"]
    consequences = [case for case in current if case.diagnosis.role == "consequence"]
    first = _first(causes)
    early = _first(consequences)
    if first is None:
        return early
    if early and early.log == first.log and _seconds_before(early.event, first.event) > LONG_BEFORE_SECONDS:
        return early
    return first


def _explains(case: Case, other: Case) -> bool:
    """`other` follows from `case` (lines of one moment come in any order), unless it had happened long before."""
    if other.diagnosis.id not in case.diagnosis.explains:
        return False
    if case.log != other.log:
        return True
    return case.run == other.run and _seconds_before(other.event, case.event) <= LONG_BEFORE_SECONDS


def _recovered(case: Case, logs: Sequence[LogFacts]) -> bool:
    """The same run went on well after it: caught and retried, or mere noise of a good end."""
    log, place = logs[case.log], case.event.place
    run_begin = max((launch.offset for launch in log.launches if launch.offset < place.offset), default=-1)
    run_end = next((launch.offset for launch in log.launches if launch.offset > place.offset), log.size_bytes + 1)
    if any(place.offset < done.offset < run_end for done in log.done):
        return True
    next_start = next((start.offset for start in log.starts if place.offset < start.offset < run_end), None)
    if next_start is not None:  # before the first training loop: the run got past it; else a new attempt began
        begun = any(run_begin < start.offset < place.offset for start in log.starts)
        marks = [*log.failures, *log.restarts]
        return not begun and not any(place.offset < mark.offset < next_start for mark in marks)
    last_run = run_end > log.size_bytes
    at_end = log.progress if last_run and log.progress and log.progress[1] == place.steps else None
    if at_end and place.step is not None and at_end[0] > place.step + MOVED_ON_STEPS:
        return True
    done_before = any(done.offset < place.offset for done in log.done)
    failed_after = any(failure.offset > place.offset for failure in log.failures)
    return done_before and not failed_after and case.diagnosis.role == "consequence"


def _in_last_run(case: Case, logs: Sequence[LogFacts]) -> bool:
    return case.run == len(logs[case.log].launches)


def _first(cases: Sequence[Case]) -> Case | None:
    """The earliest: by time where all have one, else by log and line."""
    if not cases:
        return None
    firsts: dict[int, Case] = {}
    for case in cases:
        known = firsts.get(case.log)
        if known is None or case.event.place.offset < known.event.place.offset:
            firsts[case.log] = case
    if all(case.event.place.time for case in firsts.values()):
        return min(firsts.values(), key=lambda case: (case.event.place.time or "", case.log))
    return firsts[min(firsts)]


def _seconds_before(earlier: Event, later: Event) -> float:
    times = [_clock(event.place.time) for event in (earlier, later)]
    if times[0] is None or times[1] is None:
        return 0.0
    return (times[1] - times[0]).total_seconds()


def _clock(time: str | None) -> datetime | None:
    try:
        return datetime.strptime(f"2000-{time}", "%Y-%m-%d %H:%M:%S.%f") if time else None
    except ValueError:  # digits that only look like a time
        return None


def _health(logs: Sequence[LogFacts], diagnoses: dict[str, Diagnosis]) -> list[Case]:
    found: dict[str, Case] = {}
    for number, log in enumerate(logs):
        started = log.launches[-1].offset if log.launches else -1
        records = [record for record in log.metrics if record.place.offset > started]
        for diagnosis in diagnoses.values():
            check = HEALTH_CHECKS.get(diagnosis.check)
            event = check(records, log) if check and records else None
            if event and diagnosis.id not in found:
                details = {**when(event), **event.groups}
                found[diagnosis.id] = Case(diagnosis, event, details, number, len(log.launches))
    return list(found.values())


def _first_of_each(cases: Sequence[Case]) -> list[Case]:
    return list({case.diagnosis.id: case for case in reversed(cases)}.values())[::-1]


def _first_of_each_log(cases: Sequence[Case]) -> list[Case]:
    return list({(case.log, case.diagnosis.id, case.run): case for case in reversed(cases)}.values())[::-1]


def _finding(case: Case, cases: Sequence[Case], logs: Sequence[LogFacts]) -> Finding:
    same = [other.event.place for other in cases if other.diagnosis.id == case.diagnosis.id and other.run == case.run]
    spoken = _spoken(case, cases).event.place
    places = list(dict.fromkeys([spoken, case.event.place, *same]))
    marks = [save for save in logs[case.log].saves if save.offset < case.event.place.offset]
    if "save" in case.diagnosis.phase and marks:
        places.insert(1, marks[-1])
    evidence = tuple(Evidence(_where(place), lines.shown(place.text)) for place in places[:SHOWN_EVIDENCE])
    values = _Missing(_spoken(case, cases).details)
    diagnosis = case.diagnosis
    return Finding(
        diagnosis.id,
        diagnosis.severity,
        " ".join(diagnosis.title.format_map(values).split()),
        evidence,
        " ".join(diagnosis.cause.format_map(values).split()),
        diagnosis.fix,
    )


def _spoken(case: Case, cases: Sequence[Case]) -> Case:
    """The same diagnosis where the message itself stands: a traceback shows its source line, `raise …`, before."""
    if not _RAISE.search(case.event.place.text):
        return case
    same = (other for other in cases if (other.diagnosis, other.log, other.run) == (case.diagnosis, case.log, case.run))
    return next((other for other in same if not _RAISE.search(other.event.place.text)), case)


class _Missing(dict[str, str]):
    """A text may name what only some of its patterns catch; the others leave it out."""

    def __missing__(self, key: str) -> str:
        return ""


def _telling(logs: Sequence[LogFacts]) -> tuple[Evidence, ...]:
    """For logs without a diagnosis: the first and last lines that sound like trouble, then how each ends."""
    places: dict[tuple[str, int], Place] = {}
    for log in logs:
        for place in [*log.telling_first, *log.telling_last, *log.tail]:
            places.setdefault((place.file, place.line), place)
    shown = list(places.values())[: SHOWN_TELLING * len(logs)]
    return tuple(Evidence(_where(place), lines.shown(place.text)) for place in shown)


def _where(place: Place) -> str:
    return f"{place.file}:{place.line}"
