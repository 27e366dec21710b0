"""Whether a save fits on every node's disk and in its memory: asked before training starts and before each save."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpofit.train.guard.config import GuardConfig
from dpofit.train.guard.exchange import Exchange, SaveAborted
from dpofit.train.guard.machine import free_disk_bytes, is_memory_backed, memory_headroom
from dpofit.train.guard.stock import native_bytes, state_entries
from dpofit.units import GIB, MIB

logger = logging.getLogger("dpofit.guard")

_DISK_MARGIN = 1.01  # file-system metadata, trainer state, tokenizer
_PROCESS_MARGIN_BYTES = 64 * MIB  # what a rank needs besides its chunks


@dataclass(frozen=True, slots=True)
class Needs:
    """What one rank tells rank 0 about its place, for the check before anything is written."""

    host: str
    leader: int  # the lowest rank that sees the same folder
    state_bytes: int
    free_disk_bytes: int
    in_memory: bool
    headroom_bytes: int
    headroom_by: str

    def to_json(self) -> list[Any]:
        """The fields in order."""
        return [getattr(self, name) for name in Needs.__slots__]


def needs_here(folder: Path, leader: int, state_bytes: int) -> Needs:
    """This rank's place: `folder` must exist; `state_bytes` are its optimizer files to come."""
    headroom = memory_headroom()
    return Needs(
        socket.gethostname(), leader, state_bytes, free_disk_bytes(folder), is_memory_backed(folder),
        headroom.available_bytes, headroom.limited_by,
    )  # fmt: skip


def check_room(needs: list[Needs], config: GuardConfig, weights: int, held_by_writer: int) -> None:
    """OSError names every node and disk that lacks room. Runs before anything the run had is touched."""
    lacking: list[str] = []
    for leader in sorted({need.leader for need in needs}):
        seers = [need for need in needs if need.leader == leader]
        wanted = int(_DISK_MARGIN * (sum(need.state_bytes for need in seers) + (weights if leader == 0 else 0)))
        free = min(need.free_disk_bytes for need in seers)
        if wanted > free:
            lacking.append(f"disk of {seers[0].host}: this save needs {wanted:,} bytes, {free:,} are free")
    for host in dict.fromkeys(need.host for need in needs):
        local = [need for need in needs if need.host == host]
        wanted = len(local) * (3 * config.chunk_bytes + _PROCESS_MARGIN_BYTES)
        if needs[0].host == host:
            wanted += held_by_writer
        if any(need.in_memory for need in local):  # tmpfs: the files themselves are memory
            wanted += sum(need.state_bytes for need in local) + (weights if needs[0].host == host else 0)
        least = min(local, key=lambda need: need.headroom_bytes)
        if wanted > least.headroom_bytes:
            lacking.append(
                f"memory of {host}: this save needs {wanted:,} bytes, "
                f"{least.headroom_bytes:,} are left by {least.headroom_by}"
            )
    if lacking:
        raise OSError("; ".join(lacking))


def say_at_start(trainer: Any, config: GuardConfig, exchange: Exchange) -> None:
    """One line on rank 0 about the saves to come, or a warning that they won't fit; OSError then if asked to stop.

    Folders can't be probed before the first save, so one disk for all ranks is assumed here.
    """
    needs, weights, error = None, 0, None
    try:
        entries = state_entries(trainer)
        if _saves_adapters_only(trainer):
            entries = {name: tensor for name, tensor in entries.items() if "lora_" in name or "modules_to_save" in name}
        weights = native_bytes(entries)
        needs = needs_here(_existing(Path(trainer.args.output_dir)), 0, _state_bytes_to_come(trainer)).to_json()
    except Exception as failure:  # a question about later must not end training now
        error = f"{type(failure).__name__}: {failure}"

    def decide(answers: list[Any]) -> list[Any]:
        everyone = [Needs(*answer) for answer in answers]
        try:
            check_room(everyone, config, weights, held_by_writer=0)
        except OSError as lacking:
            return [0, str(lacking)]
        return [weights + sum(need.state_bytes for need in everyone), ""]

    try:
        total, lacking = exchange.round("at-start", needs, error, decide=decide)
    except SaveAborted as aborted:
        logger.warning("dpofit save guard: whether saves will fit can't be told (%s)", aborted)
        return
    if lacking and config.on_failure == "stop":
        raise OSError(f"saves will not fit: {lacking}")
    if exchange.rank == 0 and lacking:
        logger.warning("dpofit save guard: saves will be refused unless room is made: %s", lacking)
    elif exchange.rank == 0:
        print(
            f"dpofit save guard: a checkpoint will take about {total / 1e9:,.2f} GB of disk and at most "
            f"{config.memory_bytes / MIB:,.0f} MiB of each rank's memory; the stock save would hold "
            f"{weights / GIB:,.2f} GiB on rank 0, {2 * weights / GIB:,.2f} with DeepSpeed's leak",
            flush=True,
        )


def _state_bytes_to_come(trainer: Any) -> int:
    """`state_bytes` once the first step has made Adam's two moments, each as large as the masters."""
    now = state_bytes(trainer)
    optimizer = trainer.optimizer
    while optimizer is not None and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return now if optimizer is None or optimizer.state or "Adam" not in type(optimizer).__name__ else 3 * now


def _saves_adapters_only(trainer: Any) -> bool:
    return hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config")


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def state_bytes(trainer: Any) -> int:
    """Bytes of this rank's optimizer file: fp32 masters and moments, from what is really there."""
    if trainer.args.save_only_model or trainer.optimizer is None:
        return 0
    optimizer = trainer.optimizer
    masters: list[Any] = []
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):  # ZeRO 3; 1 and 2
            masters = masters or list(getattr(optimizer, name, []))
        optimizer = optimizer.optimizer
    masters = masters or [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = [value for values in optimizer.state.values() for value in values.values()]
    return sum(value.nbytes for value in (*moments, *masters) if isinstance(value, torch.Tensor))
