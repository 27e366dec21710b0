"""Signs that DPO will do little or harm: length bias, style, distance between the answers, the policy's own view."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpofit.data.duplicates import words
from dpofit.data.sample import Sampled

# A share is reported when its 95% interval lies wholly beyond these; docs/data-checks.md names them.
LONGER_SHARE = 0.65  # chosen longer than rejected in about two of three pairs
SEPARABLE_SHARE = 0.9
TINY_EDIT = 0.95  # word similarity from which less than one word in twenty differs
TINY_EDIT_SHARE = 0.5
MIN_PAIRS = 50  # below this no share says anything
EDIT_WORDS = 400  # words of each answer that the edit distance looks at


@dataclass(frozen=True, slots=True)
class Share:
    """A share of pairs with its 95% Wilson interval."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 1927 score interval at 95%."""
        if not self.total:
            return 0.0, 1.0
        z, n, p = 1.959964, self.total, self.value
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return middle - half, middle + half

    def above(self, threshold: float) -> bool:
        """Whether the whole interval lies above."""
        return self.total >= MIN_PAIRS and self.interval[0] > threshold

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.0%} (95% interval {low:.1%} to {high:.1%} of {self.total:,})"


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Which side is longer, over all pairs of different length."""

    longer: Share
    median_ratio: float  # chosen / rejected

    @classmethod
    def of(cls, chosen: np.ndarray, rejected: np.ndarray) -> LengthBias:
        unequal = chosen != rejected
        ratio = float(np.median(chosen / np.maximum(rejected, 1))) if len(chosen) else 1.0
        return cls(Share(int((chosen > rejected).sum()), int(unequal.sum())), ratio)


@dataclass(frozen=True, slots=True)
class Style:
    """How well single words tell chosen from rejected in pairs that were held out."""

    accuracy: Share
    chosen_words: tuple[str, ...]  # the words that speak most for chosen
    rejected_words: tuple[str, ...]


def style(pairs: Sequence[Sampled]) -> Style:
    """Two-fold naive Bayes over word counts; the score is a mean per word, so length alone decides nothing."""
    tokens = [(words(pair.chosen), words(pair.rejected)) for pair in pairs]
    hits = 0
    for held in (0, 1):
        odds = _log_odds(tokens[1 - held :: 2])
        for chosen, rejected in tokens[held::2]:
            a, b = _score(chosen, odds), _score(rejected, odds)
            hits += a > b
            hits += (a == b) * 0.5  # type: ignore[assignment]
    odds = _log_odds(tokens)
    counts = Counter(word for pair in tokens for side in pair for word in set(side))
    common = [word for word, count in counts.items() if count >= max(5, len(pairs) // 50)]
    ranked = sorted(common, key=lambda word: odds[word])
    return Style(Share(int(hits), len(pairs)), tuple(ranked[::-1][:6]), tuple(ranked[:6]))


def _log_odds(tokens: Sequence[tuple[list[str], list[str]]]) -> dict[str, float]:
    chosen: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for one, other in tokens:
        chosen.update(one)
        rejected.update(other)
    vocabulary = chosen.keys() | rejected.keys()
    total = (sum(chosen.values()) + len(vocabulary), sum(rejected.values()) + len(vocabulary))
    return {w: math.log((chosen[w] + 1) / total[0]) - math.log((rejected[w] + 1) / total[1]) for w in vocabulary}


def _score(tokens: list[str], odds: dict[str, float]) -> float:
    return sum(odds.get(word, 0.0) for word in tokens) / max(1, len(tokens))


@dataclass(frozen=True, slots=True)
class Edits:
    """How alike the two answers of a pair are, beside answers to different prompts. 1 is equal, 0 shares nothing."""

    median: float
    unrelated_median: float
    unrelated_p95: float
    tiny: Share

    @property
    def unrelated(self) -> bool:
        """Whether the typical pair is no more alike than answers to different prompts are."""
        return self.tiny.total >= MIN_PAIRS and self.median <= self.unrelated_p95


def edits(pairs: Sequence[Sampled]) -> Edits:
    """Normalised Indel similarity over words (rapidfuzz); the baseline sets each chosen beside the next rejected."""
    from rapidfuzz.distance import Indel

    different = [pair for pair in pairs if pair.chosen != pair.rejected]
    chosen = [words(pair.chosen)[:EDIT_WORDS] for pair in different]
    rejected = [words(pair.rejected)[:EDIT_WORDS] for pair in different]
    alike = [Indel.normalized_similarity(a, b) for a, b in zip(chosen, rejected, strict=True)]
    shifted = range(1, len(different))
    unrelated = [
        Indel.normalized_similarity(chosen[n - 1], rejected[n])
        for n in shifted
        if different[n].prompt != different[n - 1].prompt
    ]
    return Edits(
        median=float(np.median(alike)) if alike else 1.0,
        unrelated_median=float(np.median(unrelated)) if unrelated else 0.0,
        unrelated_p95=float(np.quantile(unrelated, 0.95)) if unrelated else 0.0,
        tiny=Share(sum(value >= TINY_EDIT for value in alike), len(alike)),
    )


@dataclass(frozen=True, slots=True)
class PolicyView:
    """Log-probabilities per token that the policy, before training, gives to both answers."""

    chosen_likelier: Share  # pairs in which it finds the chosen answer likelier, per token
    chosen_mean: float  # nats a token
    rejected_mean: float

    @classmethod
    def of(cls, chosen: np.ndarray, rejected: np.ndarray) -> PolicyView:
        likelier = Share(int((chosen > rejected).sum()), len(chosen))
        return cls(likelier, float(chosen.mean()), float(rejected.mean()))
