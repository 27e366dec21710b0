"""The lengths of every usable pair, 24 bytes each: distribution, outliers, and the table that `predict` reads."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpofit.data.tokens import Measured
from dpofit.data.truncate import Lengths
from dpofit.memory.lengths import FEWEST_PAIRS, OUTLIER_RATIO, OUTLIER_SHARE

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
PAD_MULTIPLE = 8  # llamafactory 0.9.5 train/dpo/workflow.py: pad_to_multiple_of=8
LONG_ANSWER_TOKENS = 1024  # the field notes' rule


@dataclass(frozen=True, slots=True)
class Distribution:
    """Token counts at the quantiles of QUANTILES, and the mean."""

    mean: float
    quantiles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outliers:
    """The few longest rows, and how they compare with the longest of the rest, in tokens a row."""

    count: int
    longest: int
    longest_of_rest: int
    indices: tuple[int, ...]

    @property
    def ratio(self) -> float:
        return self.longest / self.longest_of_rest


class LengthTable:
    """Lengths after `cutoff_len` (`prompt`, `chosen`, `rejected`) and before it (`full_*`), one entry a pair."""

    def __init__(self) -> None:
        self._kept = tuple(array("I") for _ in range(3))
        self._full = tuple(array("I") for _ in range(3))
        self._exact = 0

    def add(self, measured: Measured) -> None:
        kept, full = measured.kept, measured.lengths
        for column, value in zip(self._kept, (kept.prompt, kept.chosen, kept.rejected), strict=True):
            column.append(value)
        for column, value in zip(self._full, (full.prompt, full.chosen, full.rejected), strict=True):
            column.append(value)
        self._exact += measured.exact

    def __len__(self) -> int:
        return len(self._kept[0])

    @property
    def all_exact(self) -> bool:
        return self._exact == len(self)

    @property
    def estimated(self) -> int:
        return len(self) - self._exact

    @property
    def prompt(self) -> np.ndarray:
        return np.asarray(self._kept[0], np.int64)

    @property
    def chosen(self) -> np.ndarray:
        return np.asarray(self._kept[1], np.int64)

    @property
    def rejected(self) -> np.ndarray:
        return np.asarray(self._kept[2], np.int64)

    @property
    def row(self) -> np.ndarray:
        """prompt + the longer answer: the tokens that pad the batch."""
        return self.prompt + np.maximum(self.chosen, self.rejected)

    @property
    def full_chosen(self) -> np.ndarray:
        return np.asarray(self._full[1], np.int64)

    @property
    def full_rejected(self) -> np.ndarray:
        return np.asarray(self._full[2], np.int64)

    def full_at(self, index: int) -> Lengths:
        """One pair's lengths before `cutoff_len`."""
        return Lengths(self._full[0][index], self._full[1][index], self._full[2][index])

    @property
    def full_row(self) -> np.ndarray:
        return np.asarray(self._full[0], np.int64) + np.maximum(self.full_chosen, self.full_rejected)

    def distribution(self, column: str) -> Distribution:
        """`column` is prompt, chosen, rejected or row. Quantiles are values that occur (inverted CDF)."""
        values = getattr(self, column)
        quantiles = np.quantile(values, QUANTILES, method="inverted_cdf")
        return Distribution(float(values.mean()), tuple(int(q) for q in quantiles))

    def long_answers(self) -> np.ndarray:
        """Indices of pairs with an answer over the field notes' 1,024 tokens, as trained."""
        return np.flatnonzero(np.maximum(self.chosen, self.rejected) > LONG_ANSWER_TOKENS)

    def outliers(self) -> Outliers | None:
        """The widest gap among the longest 1% of the rows, if those above it are at least 1.25x those below."""
        rows = self.row
        few = min(int(len(rows) * OUTLIER_SHARE), len(rows) - 1)
        if len(rows) < FEWEST_PAIRS:
            return None
        order = np.argsort(rows, kind="stable")[::-1]
        top = rows[order[: max(few, 1) + 1]]
        gaps = top[:-1] / np.maximum(top[1:], 1)
        count = int(np.argmax(gaps)) + 1
        if gaps[count - 1] < OUTLIER_RATIO:
            return None
        return Outliers(count, int(top[0]), int(top[count]), tuple(int(i) for i in order[:count]))

    def table(self) -> Iterator[tuple[int, int, int, int]]:
        """(prompt, chosen, rejected, count) of every combination that occurs, sorted: what predict reads."""
        triples = np.stack([self.prompt, self.chosen, self.rejected], axis=1)
        unique, counts = np.unique(triples, axis=0, return_counts=True)
        for (prompt, chosen, rejected), count in zip(unique.tolist(), counts.tolist(), strict=True):
            yield prompt, chosen, rejected, count
