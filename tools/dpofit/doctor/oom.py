"""Reads the numbers in torch's out-of-memory messages, old and new wording, CUDA and its cousins."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_SIZE = r"([\d.]{1,12}) (bytes|KiB|MiB|GiB|KB|MB|GB)"
_WANTED = re.compile(r"Tried to allocate " + _SIZE)
_FIELDS = {  # torch 2.x wording, then torch ≤ 2.0 (c10/cuda/CUDACachingAllocator.cpp)
    "device": re.compile(r"(?:GPU |NPU |GPU:|XPU )(\d+)"),
    "total": re.compile(rf"(?:total capac?i?ty of {_SIZE}|{_SIZE} total capacity)"),
    "free": re.compile(rf"(?:of which {_SIZE} is free|; {_SIZE} free)"),
    "own": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated": re.compile(rf"(?:{_SIZE} is allocated by PyTorch|{_SIZE} already allocated)"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{_SIZE} reserved in total by PyTorch"),
}
_OTHER = re.compile(rf"Process \w+ has {_SIZE}")
ROUNDING_BYTES = 2 << 20  # the caching allocator asks for multiples of this above 10 MiB
# Below a tenth of the card, gaps are what any caching leaves: closing them would only move the failure a step on.
MATERIAL_SHARE = 0.1
CONTEXT_BYTES = 1 << 30  # a bare CUDA context holds 0.14-0.92 GiB (T4 … A100); more is somebody's work


@dataclass(frozen=True, slots=True)
class Oom:
    """One message. Bytes as printed (two decimals); None where this wording or a cut line has no such number."""

    wanted_bytes: int | None
    wanted_within_bytes: tuple[int, int] | None  # what was asked for lies here: print and allocator rounding
    device: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None  # reserved by torch, not in use: the gaps
    other_processes_bytes: tuple[int, ...] = ()

    @property
    def fragmented(self) -> bool:
        """True when torch's gaps are a material part of the card and, with what was free, would have been enough."""
        if self.wanted_bytes is None or self.unallocated_bytes is None:
            return False
        held = self.total_bytes or (self.allocated_bytes or 0) + self.unallocated_bytes
        enough = self.unallocated_bytes + (self.free_bytes or 0) >= self.wanted_bytes
        return enough and self.unallocated_bytes >= MATERIAL_SHARE * held

    @property
    def strangers_bytes(self) -> tuple[int, ...]:
        """Memory of other processes that hold more than a bare context on this GPU."""
        return tuple(size for size in self.other_processes_bytes if size > CONTEXT_BYTES)


def read_oom(text: str) -> Oom:
    """The numbers of an out-of-memory message; numbers that a cut line lost are None."""
    wanted = _WANTED.search(text)
    wanted_bytes = _bytes(wanted) if wanted else None
    numbers = {
        name: _bytes(match) for name, pattern in _FIELDS.items() if name != "device" and (match := pattern.search(text))
    }
    device = _FIELDS["device"].search(text)
    allocated, reserved = numbers.get("allocated"), numbers.get("reserved")
    unallocated = numbers.get("unallocated")
    if unallocated is None and allocated is not None and reserved is not None:
        unallocated = max(0, reserved - allocated)
    others = [_bytes(match) for match in _OTHER.finditer(text)]
    if "own" not in numbers and allocated is not None and others:  # torch 2.1 lists its own process among them
        own = next((size for size in sorted(others) if size >= allocated), None)
        if own is not None:
            others.remove(own)
            numbers["own"] = own
    return Oom(
        wanted_bytes,
        _within(wanted) if wanted else None,
        int(device[1][:4]) if device else None,
        numbers.get("total"),
        numbers.get("free"),
        numbers.get("own"),
        allocated,
        unallocated,
        tuple(others),
    )


def _bytes(match: re.Match[str]) -> int:
    """The first size among the groups of a match."""
    number, unit = next((a, b) for a, b in zip(match.groups()[::2], match.groups()[1::2], strict=False) if a)
    try:
        return round(float(number) * _UNITS[unit])
    except ValueError:  # "1.2.3": not a number torch printed
        return 0


def _within(match: re.Match[str]) -> tuple[int, int]:
    """What may have been asked for: the allocator rounded it up to 2 MiB, and two decimals were printed of that."""
    printed = _bytes(match)
    half = _UNITS[match[2]] // 200 if "." in match[1] else 0
    if printed < 10 << 20:  # 2 MiB and 20 MiB are what small requests become
        return 1, printed + half
    lowest = -(-(printed - half) // ROUNDING_BYTES) * ROUNDING_BYTES
    highest = (printed + half) // ROUNDING_BYTES * ROUNDING_BYTES
    if lowest > highest:  # no multiple prints so: an allocator that does not round
        return printed - half, printed + half
    return lowest - ROUNDING_BYTES + 1, highest
