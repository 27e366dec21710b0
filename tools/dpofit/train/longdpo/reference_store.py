"""Reference log-probs on disk: lines while they are computed, one sealed file when all are there."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy

from dpofit.errors import BadInput, Problem
from dpofit.train.guard.durable import fsync_folder
from dpofit.train.longdpo.reference_key import Key, differences
from dpofit.train.longdpo.reference_rows import KEY_BYTES

SCHEMA = "dpofit.reference/1"
SEALED = "logps.safetensors"
Values = dict[bytes, float]  # row key → log-prob, a float32 value


@dataclass(frozen=True, slots=True)
class Found:
    """What a folder holds that may be used."""

    values: Values
    sealed: bool


def read(folder: Path, key: Key) -> Found:
    """The log-probs in `folder` for exactly this key: a sealed file, or what earlier passes got done.

    BadInput, naming what changed or broke and how to start over, for everything else that is there.
    """
    if (folder / SEALED).exists():
        return Found(_read_sealed(folder / SEALED, key), True)
    values: Values = {}
    for path in sorted(folder.glob("partial.*.jsonl")):
        values |= _read_lines(path, key)
    return Found(values, False)


def refused(path: Path, wrong: str) -> BadInput:
    """The error for a cache that must not be used."""
    folder = path if path.is_dir() else path.parent
    return BadInput(
        Problem(str(path), None, f"this cache of reference log-probs {wrong}",
                f"If that is intended, delete {folder} and start from step 0: it is computed anew.")
    )  # fmt: skip


class Lines:
    """Appends what one rank computes, so that a killed pass loses at most the line it was writing."""

    def __init__(self, folder: Path, rank: int, key: Key) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        taken = 0
        while (folder / f"partial.{rank}.{taken}.jsonl").exists():
            taken += 1
        self._file = (folder / f"partial.{rank}.{taken}.jsonl").open("x")
        self._write(json.dumps({"schema": SCHEMA, "key": key}))

    def add(self, values: Mapping[bytes, float]) -> None:
        """One line a row."""
        for row, value in values.items():
            self._write(f"{row.hex()} {float(value).hex()}")

    def _write(self, text: str) -> None:
        self._file.write(f"{zlib.crc32(text.encode()):08x} {text}\n")
        self._file.flush()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def seal(folder: Path, key: Key, values: Values) -> None:
    """Put all of `values` into one checksummed file, in one step, and remove the lines."""
    from safetensors.numpy import save

    rows, logps = _arrays(values)
    metadata = {"schema": SCHEMA, "key": json.dumps(key), "sha256": _checksum(rows, logps)}
    folder.mkdir(parents=True, exist_ok=True)
    # Several nodes may share the folder: each writes the same bytes, the last rename wins.
    staging = folder / f".{SEALED}.{os.uname().nodename}.{os.getpid()}"
    with staging.open("wb") as file:
        file.write(save({"rows": rows, "logps": logps}, metadata))
        file.flush()
        os.fsync(file.fileno())
    staging.replace(folder / SEALED)
    fsync_folder(folder)


def remove_lines(folder: Path) -> None:
    """After sealing; several nodes may do it at once."""
    for path in folder.glob("partial.*.jsonl"):
        path.unlink(missing_ok=True)


def _read_sealed(path: Path, key: Key) -> Values:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            rows, logps = file.get_tensor("rows"), file.get_tensor("logps")
    except (SafetensorError, OSError, ValueError) as error:
        raise refused(path, f"is damaged ({error})") from None
    _check_key(path, metadata, key)
    if metadata.get("sha256") != _checksum(rows, logps):
        raise refused(path, "is damaged (its checksum does not match)")
    return {row.tobytes(): float(value) for row, value in zip(rows, logps, strict=True)}


def _read_lines(path: Path, key: Key) -> Values:
    text = path.read_text(errors="replace")
    lines = text.split("\n")
    lines.pop()  # what follows the last newline: nothing, or the line that a kill cut short
    values: Values = {}
    for number, line in enumerate(lines, 1):
        checksum, _, content = line.partition(" ")
        if checksum != f"{zlib.crc32(content.encode()):08x}":
            raise refused(path, f"is damaged (line {number})")
        if number == 1:
            header = json.loads(content)
            _check_key(path, {"schema": header["schema"], "key": json.dumps(header["key"])}, key)
            continue
        row, value = content.split()
        values[bytes.fromhex(row)] = float.fromhex(value)
    return values


def _check_key(path: Path, metadata: Mapping[str, str], key: Key) -> None:
    if metadata.get("schema") != SCHEMA:
        raise refused(path, f"is of schema {metadata.get('schema')}, not {SCHEMA}")
    changed = differences(json.loads(metadata["key"]), key)
    if changed:
        raise refused(path, f"was made for something else: {'; '.join(changed)}")


def _arrays(values: Values) -> tuple[numpy.ndarray, numpy.ndarray]:
    rows = numpy.frombuffer(b"".join(values), dtype=numpy.uint8).reshape(-1, KEY_BYTES)
    return rows, numpy.fromiter(values.values(), dtype=numpy.float32, count=len(values))


def _checksum(rows: numpy.ndarray, logps: numpy.ndarray) -> str:
    return hashlib.sha256(rows.tobytes() + logps.tobytes()).hexdigest()


def missing(rows: Iterable[bytes], values: Values) -> int:
    """How many of `rows` have no log-prob."""
    return sum(row not in values for row in set(rows))
