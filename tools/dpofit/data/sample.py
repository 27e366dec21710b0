"""A uniform sample of pairs of a stream of unknown length, kept in bounded memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dpofit.data.convert import Pair

CLIP_CHARS = 4_000  # per text: enough for style and edits, and 5,000 pairs stay under 60 MB


@dataclass(frozen=True, slots=True)
class Sampled:
    """One pair of the sample, texts clipped."""

    index: int  # position among the usable pairs
    prompt: str
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
        texts = (pair.prompt_text, pair.chosen.content, pair.rejected.content)
        item = Sampled(index, *(text[:CLIP_CHARS] for text in texts))
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
