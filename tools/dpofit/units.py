"""Bytes as people write and read them; GiB is 2^30, GB is 10^9."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_FACTOR = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """`64GiB`, `10TB`, `256M` (binary) → bytes; ValueError says what would be right."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _FACTOR:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 64GiB, 80GB or 10TB")
    size = float(match[1]) * _FACTOR[match[2].lower()]
    if size > 2**80:  # float("9" * 400) is infinite
        raise ValueError(f"{text[:20]!r}… is more than there is anywhere; check the number")
    return round(size)


def gib(n_bytes: float) -> float:
    """Bytes → GiB."""
    return n_bytes / GIB


def format_gib(n_bytes: float) -> str:
    """Bytes → `12.3 GiB`."""
    return f"{n_bytes / GIB:,.1f} GiB"
