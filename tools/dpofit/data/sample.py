"""A uniform sample of pairs of a stream of unknown length, kept in bounded memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dpofit.data.convert import Pair

# Per text, half from its start and half from its end: enough for style and edits, and 5,000 pairs stay under 60 MB.
CLIP_CHARS = 4_000


@dataclass(frozen=True, slots=True)
class Sampled:
    """One pair of the sample, texts clipped."""

    index: int  # position among the usable pairs
    prompt: str  # without the system message, which many rows may share
    chosen: str
    rejected: str


class Reservoir:
    """Vitter's algorithm R, seeded: the same file gives the same sample."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size, self._random, self._seen = size, random.Random(seed), 0
        self._kept: list[Sampled] = []

    def offer(self, pair: Pair) -> None:
        index = self._seen
        self._seen += 1
        slot = index if index < self._size else self._random.randrange(self._seen)
        if slot >= self._size:
            return
        prompt = "\n".join(message.content for message in pair.prompt)
        item = Sampled(index, *map(_clipped, (prompt, pair.chosen.content, pair.rejected.content)))
        if slot == len(self._kept):
            self._kept.append(item)
        else:
            self._kept[slot] = item

    @property
    def pairs(self) -> list[Sampled]:
        return sorted(self._kept, key=lambda item: item.index)

    @property
    def basis(self) -> str:
        if self._seen <= self._size:
            return f"all {self._seen:,} pairs"
        return f"a uniform sample of {self._size:,} of {self._seen:,} pairs"


def _clipped(text: str) -> str:
    """A shared preamble must not make two long prompts look alike, so the end is kept as well."""
    half = CLIP_CHARS // 2
    return text if len(text) <= CLIP_CHARS else f"{text[:half]} … {text[-half:]}"
