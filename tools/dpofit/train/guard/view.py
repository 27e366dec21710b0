"""Finds out which ranks see the same folder, by what they can read of each other's writes, not by its path."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpofit.train.guard.exchange import Exchange

_PROBE = ".dpofit-probe"
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class FolderView:
    """`leader` is the lowest rank that sees this rank's folder; `shared` says all ranks can write one file together."""

    leader: int
    shared: bool


def probe(folder: Path, exchange: Exchange) -> FolderView:
    """Create `folder` on every rank and compare views. Raises SaveAborted on all ranks if any can't write there.

    Node-local disks under one path would take every rank's slices without complaint and leave zeros in between;
    so rank 0 must read back what each rank wrote at its own offset of one file.
    """
    rank, world_size = exchange.rank, exchange.world_size
    place = folder / _PROBE
    nonce = secrets.token_hex(_NONCE_BYTES // 2)
    error = _attempt(lambda: _create(place, rank, world_size, nonce))
    nonces: list[str] = exchange.round("probe-create", nonce, error, decide=list)
    error = _attempt(lambda: _write_nonce(place, rank, nonce, nonces[0]))
    exchange.round("probe-write", None, error)
    seen = sorted(other for other in range(world_size) if (place / f"{other}-{nonces[other]}").exists())
    together = rank != 0 or _read_nonces(place, world_size) == nonces
    leader = min(seen, default=rank)
    shared: bool = exchange.round(
        "probe-read", [leader, together], decide=lambda all_: all(x == [0, True] for x in all_)
    )
    if rank == leader:
        for path in place.iterdir():
            path.unlink(missing_ok=True)
        place.rmdir()
    return FolderView(leader, shared)


def _create(place: Path, rank: int, world_size: int, nonce: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        with (place / "shared").open("wb") as file:
            file.write(nonce.encode())
            file.truncate(_NONCE_BYTES * world_size)
            file.flush()
            os.fsync(file.fileno())


def _write_nonce(place: Path, rank: int, nonce: str, first: str) -> None:
    (place / f"{rank}-{nonce}").touch()
    try:
        fd = os.open(place / "shared", os.O_RDWR)
    except FileNotFoundError:
        return  # another view; rank 0 will miss our nonce
    try:
        if os.pread(fd, _NONCE_BYTES, 0).decode(errors="replace") == first:
            os.pwrite(fd, nonce.encode(), _NONCE_BYTES * rank)
            os.fsync(fd)
    finally:
        os.close(fd)


def _read_nonces(place: Path, world_size: int) -> list[str]:
    data = (place / "shared").read_bytes().decode(errors="replace")
    return [data[index * _NONCE_BYTES :][:_NONCE_BYTES] for index in range(world_size)]


def _attempt(action: Callable[[], None]) -> str | None:
    try:
        action()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None
