"""Lengths of a job: from flags, from a file of measured pairs, or from cutoff_len."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.memory.job import Lengths

OUTLIER_SHARE = 0.01  # at most this share of the pairs can be called the few
OUTLIER_RATIO = 1.25  # and their rows must be this much longer than the longest of the rest
FEWEST_PAIRS = 20  # of fewer, none is an outlier
QUANTILES = (0.5, 0.75, 0.9, 0.99)  # batches of the mix that a file of lengths gives, beside its longest pair


@dataclass(frozen=True, slots=True)
class PairCount:
    """`count` pairs with these token counts."""

    prompt: int
    chosen: int
    rejected: int
    count: int

    @property
    def row(self) -> int:
        return self.prompt + max(self.chosen, self.rejected)


def read_lengths(path: Path) -> list[PairCount]:
    """A JSON Lines file of {"prompt", "chosen", "rejected", "count"?}, as `dpofit data --lengths-out` writes it.

    BadInput names up to ten wrong lines at once.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(Problem(str(path), "--lengths", f"cannot be read ({error})", "Give a JSON Lines file")) from None
    pairs: list[PairCount] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        pair = _pair(line)
        if pair is None:
            right = 'Each line is like {"prompt": 812, "chosen": 240, "rejected": 180, "count": 3}, whole numbers'
            problems.append(Problem(f"{path}:{number}", None, f"{line.strip()[:60]!r} is not a pair's lengths", right))
        else:
            pairs.append(pair)
    if not pairs and not problems:
        problems.append(Problem(str(path), "--lengths", "holds no lengths", "Write one line a pair"))
    if problems:
        raise BadInput(problems[:10])
    return pairs


def _pair(line: str) -> PairCount | None:
    try:
        raw = json.loads(line)
        values = [raw["prompt"], raw["chosen"], raw["rejected"], raw.get("count", 1)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not all(type(value) is int and value >= 0 for value in values) or values[3] < 1:
        return None
    return PairCount(*values)


@dataclass(frozen=True, slots=True)
class FewLongest:
    """`count` of `total` pairs are much longer than all others, of which `rest` is the longest."""

    count: int
    total: int
    rest: Lengths


def few_longest(pairs: Sequence[PairCount], padded: bool) -> FewLongest | None:
    """The widest gap in length among the longest hundredth of the pairs, if it is at least OUTLIER_RATIO."""
    ordered = sorted(pairs, key=lambda pair: pair.row, reverse=True)
    total = sum(pair.count for pair in ordered)
    if total < FEWEST_PAIRS:
        return None
    widest, found, passed = OUTLIER_RATIO, None, 0
    for pair, shorter in pairwise(ordered):
        passed += pair.count
        if passed > max(1, int(total * OUTLIER_SHARE)):
            break
        gap = pair.row / max(shorter.row, 1)
        if gap >= widest and (found is None or gap > widest):
            rest = Lengths(shorter.prompt, shorter.chosen, shorter.rejected, padded)
            widest, found = gap, FewLongest(passed, total, rest)
    return found


def longest_and_mix(pairs: Sequence[PairCount], padded: bool) -> tuple[Lengths, tuple[Lengths, ...]]:
    """The longest pair, which sets the peak, and pairs at quantiles of the rest."""
    ordered = sorted(pairs, key=lambda pair: pair.row)
    total = sum(pair.count for pair in ordered)

    def lengths(pair: PairCount) -> Lengths:
        return Lengths(pair.prompt, pair.chosen, pair.rejected, padded)

    mix = []
    for quantile in QUANTILES:
        passed = 0
        for pair in ordered:
            passed += pair.count
            if passed >= quantile * total:
                mix.append(lengths(pair))
                break
    longest = lengths(ordered[-1])
    return longest, tuple(dict.fromkeys(shorter for shorter in mix if shorter.row_tokens < longest.row_tokens))
