"""Reads what a run's ranks logged about their memory: dpofit's own callback and LLaMA-Factory's RECORD_VRAM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.units import GIB

SCHEMA = "dpofit.memory/1"  # train/memory_log.py writes it; reading it needs no torch
TRAINER_LOG = "trainer_log.jsonl"
_REQUIRED = ("step", "rank", "local_rank", "host_rss_bytes")
_GPU = ("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "gpu_nvml_used_bytes")
_OPTIONAL = (*_GPU, "cgroup_used_bytes")


@dataclass(frozen=True, slots=True)
class RankRead:
    """The highest readings of one rank over the last run in its log. `beside_bytes`: NVML less reserved at the end of
    one step. None: never read."""

    node_rank: int
    rank: int
    steps: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    nvml_bytes: int | None
    beside_bytes: int | None
    rss_bytes: int
    cgroup_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunRead:
    """All ranks' readings, and rank 0's peaks by RECORD_VRAM (allocated, reserved; to two decimals of a GiB)."""

    files: tuple[Path, ...]
    ranks: tuple[RankRead, ...]
    record_vram: tuple[int, int] | None

    @property
    def nodes(self) -> int:
        return len({rank.node_rank for rank in self.ranks})


def read_run(output_dir: Path) -> RunRead:
    """What lies in `output_dir`; BadInput names up to ten lines that are no readings, or says that there are none."""
    logs = sorted((output_dir / "dpofit").glob("memory.*.jsonl"))
    trainer_log = output_dir / TRAINER_LOG
    problems: list[Problem] = []
    ranks = [rank for path in logs for rank in _ranks(path, problems)]
    vram = _record_vram(trainer_log, problems) if trainer_log.is_file() else None
    if not problems and not ranks and vram is None:
        wrong = f"has neither dpofit/memory.*.jsonl nor RECORD_VRAM's figures in {TRAINER_LOG}"
        right = "Give the run folder or output_dir of a run by `dpofit launch`, or of one with RECORD_VRAM=1"
        problems.append(Problem(str(output_dir), "RUN_DIR", wrong, right))
    if problems:
        raise BadInput(problems[:10])
    files = (*logs, trainer_log) if vram is not None else tuple(logs)
    return RunRead(tuple(files), tuple(ranks), vram)


def _ranks(path: Path, problems: list[Problem]) -> Iterator[RankRead]:
    node = re.fullmatch(r"memory\.(\d+)\.jsonl", path.name)
    if node is None:
        return
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    right = f"Each line is a {SCHEMA} reading, as training writes it"
    for number, reading in _lines(path, problems, right):
        if not _is_reading(reading):
            problems.append(Problem(f"{path}:{number}", None, "is not a reading", right))
            continue
        run = by_rank.setdefault(reading["rank"], [])
        if run and reading["step"] <= run[-1]["step"]:
            run.clear()  # the folder's log goes on over runs: only the last one counts
        run.append(reading)
    for rank, readings in sorted(by_rank.items()):
        yield _highest(int(node[1]), rank, readings)


def _is_reading(reading: Mapping[str, Any]) -> bool:
    numbers = [reading.get(name) for name in _REQUIRED]
    maybe = [reading.get(name) for name in _OPTIONAL]
    return (
        reading.get("schema") == SCHEMA
        and all(type(value) is int and value >= 0 for value in numbers)
        and all(value is None or (type(value) is int and value >= 0) for value in maybe)
    )


def _highest(node_rank: int, rank: int, readings: Sequence[Mapping[str, Any]]) -> RankRead:
    def highest(values: Iterable[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    allocated, reserved, nvml = (highest(reading.get(name) for reading in readings) for name in _GPU)
    # Reserved peaks, not what is reserved at the end: after a step that gave cache back the difference is too low.
    beside = highest(
        reading["gpu_nvml_used_bytes"] - reading["gpu_reserved_peak_bytes"]
        for reading in readings
        if reading.get("gpu_nvml_used_bytes") is not None and reading.get("gpu_reserved_peak_bytes") is not None
    )
    rss = max(int(reading["host_rss_bytes"]) for reading in readings)
    cgroup = highest(reading.get("cgroup_used_bytes") for reading in readings)
    return RankRead(node_rank, rank, len(readings), allocated, reserved, nvml, beside, rss, cgroup)


def _record_vram(path: Path, problems: list[Problem]) -> tuple[int, int] | None:
    """llamafactory 0.9.5 train/callbacks.py:295: `vram_allocated`, `vram_reserved` in GiB, rounded to two decimals."""
    right = "It is LLaMA-Factory's log: one JSON object a line"
    found: list[tuple[float, float]] = []
    for number, line in _lines(path, problems, right):
        pair = line.get("vram_allocated"), line.get("vram_reserved")
        if pair == (None, None):
            continue
        if not all(type(value) in (int, float) and 0 <= value < 2**20 for value in pair):  # type: ignore[operator]
            problems.append(Problem(f"{path}:{number}", "vram_allocated", f"{pair} are no sizes in GiB", right))
            continue
        found.append(pair)  # type: ignore[arg-type]
    if not found:
        return None
    allocated, reserved = (max(column) for column in zip(*found, strict=True))
    return int(allocated * GIB), int(reserved * GIB)


def _lines(path: Path, problems: list[Problem], right: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, object) of a JSON Lines file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(str(path), None, f"cannot be read ({error})", ""))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield number, value
        else:
            problems.append(Problem(f"{path}:{number}", None, f"{line.strip()[:60]!r} is not a JSON object", right))
