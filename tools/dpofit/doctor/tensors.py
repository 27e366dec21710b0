"""Which tensor of a model has the size that an allocation failed on."""

from __future__ import annotations

import math
from dataclasses import dataclass

FEWEST_TOKENS = 8  # rows are padded to a multiple of 8 (llamafactory 0.9.5 train/dpo/workflow.py:51)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder that its tensors are made of."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int
    parameters: int | None = None


@dataclass(frozen=True, slots=True)
class Guess:
    """One tensor with the size asked for."""

    what: str  # "fp32 logits"
    arithmetic: str  # "2 x 7,732 x 152,064 x 4 bytes"
    tokens_per_row: tuple[int, int] | None  # from, to; None for a tensor whose size does not follow the batch

    def __str__(self) -> str:
        return f"{self.what}: {self.arithmetic}"


def which_tensor(
    wanted_bytes: int,
    within_bytes: tuple[int, int],
    shape: Shape,
    rows: int = 2,
    longest: int | None = None,
    world_size: int | None = None,
    eager: bool = True,
) -> tuple[Guess, ...]:
    """Tensors of this model that have the size of a failed allocation, the most telling first.

    wanted_bytes: as printed. within_bytes: what that print may stand for, inclusive. rows: rows of one forward,
    2 x micro batch in DPO. longest: tokens a row can have at most (cutoff_len). eager: whether attention may be the
    one that builds its scores.
    Sizes that do not follow the batch (weights, shards) come first: they match by chance only rarely. Those that
    follow it match some token count almost always; they are kept when it is possible under `longest`, widest first.
    """
    fixed = [
        Guess(what, arithmetic, None)
        for what, arithmetic, size in _fixed(shape, world_size)
        if within_bytes[0] <= size <= within_bytes[1]
    ]
    per_token = _per_token(wanted_bytes, within_bytes, shape, rows, longest)
    return tuple(fixed + per_token + (_scores(wanted_bytes, within_bytes, shape, rows, longest) if eager else []))


def _fixed(shape: Shape, world_size: int | None) -> list[tuple[str, str, int]]:
    query = shape.heads * shape.head_dim
    weights = {
        "token embedding or output head": (shape.vocab, shape.hidden),
        "MLP weight": (shape.intermediate, shape.hidden),
        "attention query or output weight": (query, shape.hidden),
        "attention key or value weight": (shape.kv_heads * shape.head_dim, shape.hidden),
    }
    found = [
        (f"{dtype} {what}", f"{a:,} x {b:,} x {width} bytes", a * b * width)
        for what, (a, b) in weights.items()
        for dtype, width in (("bf16", 2), ("fp32", 4))
    ]
    # deepspeed zero/config.py: sub_group_size 1e9 elements, stepped in fp32
    found.append(("fp32 copy of a ZeRO-3 sub-group", "1e9 elements x 4 bytes", 4_000_000_000))
    if shape.parameters and world_size:
        shard = math.ceil(shape.parameters / world_size)
        for what, width in (("bf16 shard of all parameters", 2), ("fp32 shard of all parameters", 4)):
            found.append((what, f"{shape.parameters:,} / {world_size} x {width} bytes", shard * width))
    return found


def _per_token(wanted: int, within: tuple[int, int], shape: Shape, rows: int, longest: int | None) -> list[Guess]:
    per_token = (
        ("fp32 logits", shape.vocab, 4),
        ("bf16 logits", shape.vocab, 2),
        ("bf16 MLP activation", shape.intermediate, 2),
        ("fp32 hidden states", shape.hidden, 4),
        ("bf16 hidden states", shape.hidden, 2),
    )
    found: list[Guess] = []
    for what, width, itemsize in per_token:
        each = rows * width * itemsize
        low, high = math.ceil(within[0] / each), math.floor(within[1] / each)
        if _possible(low, high, longest):
            tokens = min(max(low, round(wanted / each)), high)
            found.append(Guess(what, f"{rows} x {tokens:,} x {width:,} x {itemsize} bytes", (low, high)))
    return found


def _scores(wanted: int, within: tuple[int, int], shape: Shape, rows: int, longest: int | None) -> list[Guess]:
    each = rows * shape.heads * 2
    low, high = math.ceil(math.sqrt(within[0] / each)), math.floor(math.sqrt(within[1] / each))
    if not _possible(low, high, longest):
        return []
    tokens = min(max(low, round(math.sqrt(wanted / each))), high)
    arithmetic = f"{rows} x {shape.heads} x {tokens:,} x {tokens:,} x 2 bytes"
    return [Guess("bf16 attention scores (eager attention)", arithmetic, (low, high))]


def _possible(low: int, high: int, longest: int | None) -> bool:
    """A whole number of tokens lies in the interval, at least a handful, and within what a row can have."""
    return FEWEST_TOKENS <= low <= high and (longest is None or low <= longest)
