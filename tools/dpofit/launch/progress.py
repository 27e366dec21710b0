"""What a run has written about itself: the newest memory reading of each rank of this node."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The newest reading of one rank; sizes in bytes, None where not measured."""

    rank: int
    step: int
    loss: float | None
    gpu_reserved_peak_bytes: int | None
    host_rss_bytes: int | None
    time: float


def progress(output_dir: Path, since: float = 0.0) -> tuple[RankProgress, ...]:
    """Ranks in order, from every `memory.<node_rank>.jsonl` in sight; `since` leaves out earlier runs."""
    newest: dict[int, RankProgress] = {}
    for path in sorted((output_dir / "dpofit").glob("memory.*.jsonl")):
        for line in _tail(path):
            try:
                row = json.loads(line)
                found = RankProgress(
                    int(row["rank"]), int(row["step"]), row["loss"], row["gpu_reserved_peak_bytes"],
                    row["host_rss_bytes"], float(row["time"]),
                )  # fmt: skip
            except (ValueError, KeyError, TypeError):  # a line half written
                continue
            if found.time >= since:
                newest[found.rank] = found
    return tuple(newest[rank] for rank in sorted(newest))


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, without what progress bars overwrote."""
    lines = [line.rpartition("\r")[2].rstrip() for line in _tail(path, 32_768)]
    return [line for line in lines if line][-count:]


def _tail(path: Path, n_bytes: int = 262_144) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - n_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.split("\n")
    return lines[1:] if size > n_bytes else lines
