"""Finds repeated and contradictory pairs and prompts that leak into evaluation, in 24 bytes a row."""

from __future__ import annotations

import hashlib
import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpofit.data.convert import Pair

SHINGLE_WORDS = 5
PERMUTATIONS = 128
NEAR = 0.8  # Jaccard of word shingles from which two prompts count as near copies (Lee et al. 2022 use 0.8)
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af]|[^\W\u2e80-\u9fff\uac00-\ud7af]+|[^\w\s]")


def words(text: str) -> list[str]:
    """Lower-cased words and marks; each Chinese, Japanese or Korean character is a word."""
    return _WORD.findall(text.lower())


def fingerprint(text: str) -> int:
    """64 bits of a text, case and white space aside. Two texts of a million collide with odds of 3e-8."""
    normal = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.blake2b(normal.encode("utf-8", "replace"), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Repeats:
    """Indices (into the order of `PairHashes.add`) of rows with something to say about them."""

    duplicates: np.ndarray  # rows that repeat an earlier pair
    contradictions: np.ndarray  # rows of which another row is the reverse
    partner: dict[int, int]  # for some of those, the row they repeat or contradict
    distinct_prompts: int


class PairHashes:
    """Fingerprints of every pair, in arrays."""

    def __init__(self) -> None:
        self.prompt, self.chosen, self.rejected = array("Q"), array("Q"), array("Q")

    def add(self, pair: Pair) -> None:
        self.prompt.append(fingerprint(pair.prompt_text))
        self.chosen.append(fingerprint(pair.chosen.content))
        self.rejected.append(fingerprint(pair.rejected.content))

    def repeats(self) -> Repeats:
        """Duplicates and contradictions by sorting; O(n log n) time, 80 bytes a row while it runs."""
        prompt, chosen, rejected = (np.asarray(a, dtype=np.uint64) for a in (self.prompt, self.chosen, self.rejected))
        low, high = np.minimum(chosen, rejected), np.maximum(chosen, rejected)
        # odd multipliers keep the three parts apart under wrap-around
        key = prompt * np.uint64(0x9E3779B97F4A7C15) + low * np.uint64(0xC2B2AE3D27D4EB4F) + high
        reverse = chosen > rejected
        order = np.argsort(key, kind="stable")
        sorted_key, sorted_reverse = key[order], reverse[order]
        starts = np.flatnonzero(np.r_[True, sorted_key[1:] != sorted_key[:-1]]) if len(key) else np.array([], int)
        sizes = np.diff(np.r_[starts, len(key)])
        duplicates, contradictions, partner = [], [], {}
        for start, size in zip(starts[sizes > 1], sizes[sizes > 1], strict=True):
            rows, sides = order[start : start + size], sorted_reverse[start : start + size]
            firsts: dict[bool, int] = {}
            for row, side in zip(rows.tolist(), sides.tolist(), strict=True):
                if side in firsts:
                    duplicates.append(row)
                    partner[row] = firsts[side]
                else:
                    firsts[side] = row
            if len(firsts) == 2:
                contradictions += rows.tolist()
                partner |= {row: firsts[not side] for row, side in zip(rows.tolist(), sides.tolist(), strict=True)}
        return Repeats(
            np.sort(np.array(duplicates, int)), np.sort(np.array(contradictions, int)), partner, len(np.unique(prompt))
        )

    def prompts_in(self, other: PairHashes) -> np.ndarray:
        """Indices of rows whose prompt is also in `other`."""
        return np.flatnonzero(np.isin(np.asarray(self.prompt, np.uint64), np.asarray(other.prompt, np.uint64)))

    def split_leak(self, val_size: float) -> float:
        """Expected share of held-out rows that have a twin prompt in the training part of a random split by rows."""
        rows = len(self.prompt)
        held = val_size / rows if val_size > 1 else val_size
        _, sizes = np.unique(np.asarray(self.prompt, np.uint64), return_counts=True)
        return float((sizes * (1.0 - held ** (sizes - 1))).sum() / rows) if rows else 0.0


def near_copies(prompts: Sequence[str], against: Sequence[str] | None = None) -> list[tuple[int, int]]:
    """(index, index of the near copy) of prompts with one among the other prompts, or among `against`.

    Exact copies, case and white space aside, are left to `PairHashes`.
    """
    from datasketch import MinHash, MinHashLSH

    blank = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=zlib.crc32)

    def signature(text: str) -> MinHash:
        tokens = words(text)
        shingles = {" ".join(tokens[i : i + SHINGLE_WORDS]) for i in range(max(1, len(tokens) - SHINGLE_WORDS + 1))}
        sketch = blank.copy()
        sketch.update_batch([shingle.encode("utf-8", "replace") for shingle in shingles])
        return sketch

    pool = prompts if against is None else against
    prints = [fingerprint(text) for text in pool]
    sketches = [signature(text) for text in pool]
    index = MinHashLSH(threshold=NEAR, num_perm=PERMUTATIONS)
    with index.insertion_session() as session:
        for number, sketch in enumerate(sketches):
            session.insert(number, sketch, check_duplication=False)
    found = []
    for number, text in enumerate(prompts):
        sketch = sketches[number] if against is None else signature(text)
        own = fingerprint(text)
        near = [n for n in index.query(sketch) if prints[n] != own and sketches[n].jaccard(sketch) >= NEAR]
        if near:
            found.append((number, min(near)))
    return found
