"""Where each tensor's bytes lie in a safetensors file, decided before any byte of it exists.

The format (safetensors README, "Format"): 8 bytes little-endian header length, a JSON header padded with spaces to
8 bytes, then the tensors' row-major bytes without gaps. No torch here: verify reads checkpoints on a laptop.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dpofit.train.guard.manifest import is_inside

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of a file: `offset` counts from the start of the file, so header included."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A whole safetensors file before its data: header bytes, slots in file order, total size."""

    header: bytes
    slots: tuple[TensorSlot, ...]
    file_bytes: int


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; KeyError for a dtype that safetensors has not."""
    return prod(shape) * DTYPE_BITS[dtype] // 8


def lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None,
    dtype_rank: Callable[[str], int],
) -> FileLayout:
    """The file that safetensors' `save_file` would write for `{name: (dtype, shape)}`, header byte for byte.

    `dtype_rank` is the library's dtype order; it sorts by descending dtype, then by name
    (safetensors 0.8.0 src/tensor.rs `prepare`).
    """
    order = sorted(tensors, key=lambda name: (-dtype_rank(tensors[name][0]), name.encode()))
    entries: dict[str, object] = {}
    if metadata is not None:
        entries["__metadata__"] = dict(metadata)
    position = 0
    spans: list[tuple[str, int, int]] = []
    for name in order:
        dtype, shape = tensors[name]
        nbytes = tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        spans.append((name, position, nbytes))
        position += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    slots = tuple(
        TensorSlot(name, *tensors[name], offset=len(header) + start, nbytes=nbytes) for name, start, nbytes in spans
    )
    return FileLayout(header, slots, len(header) + position)


def read_layout(path: Path) -> tuple[FileLayout, dict[str, str]]:
    """The layout and metadata of a file on disk, header only. ValueError says what is malformed."""
    if not path.is_file():
        raise ValueError("is not a file, or a link to nothing")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{size} bytes: too short for a safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise ValueError(f"header claims {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {}) or {}
        slots = []
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if any(type(number) is not int or number < 0 for number in (start, end, *shape)):
                raise ValueError(f"{name!r} has a shape or offset that is not a whole number")
            slots.append(TensorSlot(name, entry["dtype"], shape, 8 + length + start, end - start))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"header is not valid safetensors JSON ({type(error).__name__}: {error})") from None
    slots.sort(key=lambda slot: (slot.offset, slot.nbytes))
    position = 8 + length
    for slot in slots:
        if not isinstance(slot.dtype, str) or slot.dtype not in DTYPE_BITS:
            raise ValueError(f"tensor {slot.name} has unknown dtype {slot.dtype}")
        if slot.offset != position:
            raise ValueError(f"tensor {slot.name} starts at byte {slot.offset}, expected {position}")
        if slot.nbytes != tensor_bytes(slot.dtype, slot.shape):
            raise ValueError(f"tensor {slot.name}: {slot.nbytes} bytes for {slot.dtype} {list(slot.shape)}")
        position += slot.nbytes
    return FileLayout(prefix + text, tuple(slots), position), metadata


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor → file of an index. ValueError when it isn't one, or names a file outside its folder."""
    listed = read_json_object(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError("has no weight_map of names to files")
    for file in listed.values():
        if not is_inside(file):
            raise ValueError(f"{file!r} is not a file of this folder")
    return listed


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError says why there is none."""
    if not path.is_file():
        raise ValueError("is not a file, or a link to nothing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"can't be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value
