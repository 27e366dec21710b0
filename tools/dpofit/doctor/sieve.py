"""Finds any of some hundred texts in a block of log without looking at its lines.

A text of 15 bytes or more holds, wherever it lies, eight bytes that begin at a multiple of eight. So a block is taken
as a row of 64-bit numbers, and one set intersection tells which of the numbers that the texts hold are in it: nothing
is missed, hardly anything else is found, and it does not matter whether the log repeats itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

UNIT_BYTES = 8
WINDOW_BYTES = 2 * UNIT_BYTES - 1  # the shortest text that holds a whole aligned unit wherever it begins
# Shorter texts may hold one of these, each looked for by itself: their first bytes are rare.
SHORT_WORDS = (b"Killed", b"MemoryError", b"SIGHUP", b"{'loss': ")
FEW = 256
NUMPY_FROM_BYTES = 16 << 20  # from here on importing numpy costs less than it saves
TABLE_BITS = 18
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the bits of a unit (Knuth 6.4)

# What healthy logs are full of: a unit of it would be found in every block.
_ORDINARY = b"""
[INFO] [WARNING] [logging.py:96:log_dist] [Rank 0] step= [INFO|trainer.py: [INFO|tokenization_utils_base.py:
***** Running training *****  Saving model checkpoint to /checkpoint-  Loading checkpoint shards: 100%  UserWarning:
{'loss': 0.6931, 'grad_norm': 1.0, 'learning_rate': 5e-06, 'rewards/chosen': 0.0, 'epoch': 0.01, 'train_loss': 0.6
torch.distributed.elastic.multiprocessing torch/distributed/ deepspeed/runtime/zero/ site-packages/transformers/
[torch.distributed] the parameter of the model in the file tokenizer configuration checkpointing -> optimizer
"""
# How telling a byte is: letters by their frequency in English, everything else is rarer in prose.
_WEIGHTS = [4] * 256
for _weight, _letters in enumerate((b" etaoin", b"shrdlcu0", b"mwfgypb", b"vk")):
    for _letter in _letters:
        _WEIGHTS[_letter] = _weight


def weight(text: bytes) -> int:
    """How unlikely the text is to stand in a log by chance: only good for comparing."""
    return 0 if text in _ORDINARY else sum(_WEIGHTS[byte] for byte in text)


def is_short(text: bytes) -> bool:
    """Whether it is too short to be found by its units, and is found by one of SHORT_WORDS."""
    return len(text) < WINDOW_BYTES and any(word in text for word in SHORT_WORDS)


class Sieve:
    """Looks for all of `texts` at once; each has WINDOW_BYTES or more, or is_short. `known_bytes`: that will come."""

    def __init__(self, texts: Iterable[bytes], known_bytes: int = 0) -> None:
        self._by_unit: dict[int, list[bytes]] = {}
        self._by_word: dict[bytes, list[bytes]] = {word: [] for word in SHORT_WORDS}
        for text in texts:
            if is_short(text):
                self._by_word[next(word for word in SHORT_WORDS if word in text)].append(text)
            else:
                for unit in _rarest_units(text):
                    self._by_unit.setdefault(int.from_bytes(unit, sys.byteorder), []).append(text)
        self._units = frozenset(self._by_unit)
        self._bytes = known_bytes
        self._few: Callable[[memoryview], Collection[int]] | None = None

    def texts_in(self, block: bytes) -> list[bytes]:
        """Those of the texts that the block holds."""
        units = memoryview(block)[: len(block) // UNIT_BYTES * UNIT_BYTES].cast("Q")
        self._bytes += len(block)
        if self._few is None and self._bytes > NUMPY_FROM_BYTES:
            self._few = _numpy_filter(self._units)
        found = self._units.intersection(self._few(units) if self._few else units)
        maybe = [text for unit in found for text in self._by_unit[unit]]
        for word, texts in self._by_word.items():
            if texts and _holds(block, word):
                maybe += texts
        return [text for text in dict.fromkeys(maybe) if text in block]


def _holds(block: bytes, word: bytes) -> bool:
    """Whether the word is in the block, many times faster than `in` where its first byte is rare."""
    first = word[:1]
    at = block.find(first)
    for _ in range(FEW):
        if at < 0:
            return False
        if block.startswith(word, at):
            return True
        at = block.find(first, at + 1)
    return block.find(word, max(at, 0)) >= 0


def _rarest_units(text: bytes) -> Iterator[bytes]:
    """For each of the eight ways that the text can lie, the least ordinary of its units that are then aligned."""
    for first in range(UNIT_BYTES):
        starts = range(first, len(text) - UNIT_BYTES + 1, UNIT_BYTES)
        yield max((text[start : start + UNIT_BYTES] for start in starts), key=weight)


def _numpy_filter(units: frozenset[int]) -> Callable[[memoryview], Collection[int]]:
    """Drops nearly all units that are not among `units`, by a table of their hashes."""
    import numpy as np

    def hashes(values: Any) -> Any:
        return (values * np.uint64(_GOLDEN)) >> np.uint64(64 - TABLE_BITS)

    wanted = np.zeros(1 << TABLE_BITS, np.bool_)
    wanted[hashes(np.fromiter(units, np.uint64))] = True

    def few(view: memoryview) -> Collection[int]:
        values = np.frombuffer(view, np.uint64)
        return values[wanted[hashes(values)]].tolist()  # type: ignore[no-any-return]

    return few
