"""Logs in, diagnoses out: the doctor without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dpofit.doctor.cause import Report, report
from dpofit.doctor.knowledge import load
from dpofit.doctor.read import open_all
from dpofit.doctor.scan import Scan


def diagnose(names: Sequence[str], on_bytes: Callable[[int], None] = lambda count: None) -> Report:
    """Reads each log once (`-` is standard input) and reports the first root cause over all of them.

    Raises BadInput naming every log that cannot be read. on_bytes is told the size of each block after it was read.
    """
    diagnoses = load().diagnoses
    streams = open_all(names)
    scan = Scan(diagnoses, sum(Path(name).stat().st_size for name in names if Path(name).is_file()))
    logs = []
    for name, stream in streams:
        with stream:
            logs.append(scan.read(name, stream, on_bytes))
    return report(logs, diagnoses)
