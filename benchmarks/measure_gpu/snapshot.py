"""torch's own record of every request to its CUDA allocator, as small fixtures for the allocator's replay.

A record is what `torch.cuda.memory._snapshot()["device_traces"]` holds, less what the replay decides by itself:
`[address, size_bytes, stream]` for an allocation, `[address, 0, stream]` for its end, in order.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpofit.memory.allocator import AllocatorEvent


@dataclass(frozen=True, slots=True)
class Record:
    """Requests in order, and the most bytes that torch reserved meanwhile."""

    requests: tuple[tuple[int, int, int], ...]
    reserved_peak_bytes: int


def requests(trace: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """The requests of a device trace. A block can be reused from `free_completed` on, not from `free_requested`."""
    for entry in trace:
        if entry["action"] == "alloc":
            yield entry["addr"], entry["size"], entry["stream"]
        elif entry["action"] == "free_completed":
            yield entry["addr"], 0, entry["stream"]


def write_record(path: Path, trace: Iterable[Mapping[str, Any]], reserved_peak_bytes: int) -> None:
    document = {"reserved_peak_bytes": reserved_peak_bytes, "requests": list(requests(trace))}
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(document, separators=(",", ":")).encode())


def read_record(path: Path) -> Record:
    document = json.loads(gzip.decompress(path.read_bytes()))
    return Record(tuple(tuple(request) for request in document["requests"]), document["reserved_peak_bytes"])


def allocator_events(record: Record) -> Iterator[AllocatorEvent]:
    """The record for `dpofit.memory.allocator.replay`. Ends of blocks that began before the record are left out."""
    alive: dict[int, tuple[str, int]] = {}
    for number, (address, size_bytes, stream) in enumerate(record.requests):
        if size_bytes:
            alive[address] = f"{number}", size_bytes
            yield f"{number}", size_bytes, str(stream)
        elif address in alive:
            storage, held_bytes = alive.pop(address)
            yield storage, -held_bytes, str(stream)
