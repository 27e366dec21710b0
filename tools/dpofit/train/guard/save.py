"""One guarded save, step by step: probe the folder, plan, choose a backend, write, write the manifest, commit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpofit.train.guard import folders
from dpofit.train.guard.backends import Extents, WeightsJob, write_direct, write_gather, write_routed
from dpofit.train.guard.config import Backend, GuardConfig
from dpofit.train.guard.exchange import Exchange, SaveAborted
from dpofit.train.guard.machine import PeakMemory
from dpofit.train.guard.plan import NotPlannable, Plan
from dpofit.train.guard.progress import weights_bar
from dpofit.train.guard.room import Needs, check_room, needs_here
from dpofit.train.guard.seal import leave_part, seal
from dpofit.train.guard.sources import NotDirect, span
from dpofit.train.guard.steps import reached
from dpofit.train.guard.stock import StockSave, native_bytes, plan_save, save_native, state_entries
from dpofit.train.guard.view import FolderView, probe


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one save did; `peak_extra_bytes` is the highest of all ranks, None where the kernel doesn't tell."""

    folder: str
    backend: str
    reason: str
    bytes: int
    seconds: float
    peak_extra_bytes: int | None
    native_bytes: int  # what the stock save holds in memory on rank 0
    native_leak_bytes: int  # the same with the previous save's model not yet collected


class Save:
    """One save of one trainer into `staging`, which becomes visible elsewhere only by the caller's commit."""

    def __init__(self, trainer: Any, config: GuardConfig, exchange: Exchange, staging: Path) -> None:
        self.trainer, self.config, self.exchange, self.staging = trainer, config, exchange, staging
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.backend: Backend = "native-safe"
        self.reason = ""
        self._view = FolderView(0, True)
        self._extents: Extents = {}
        self._started = time.monotonic()
        self._memory = PeakMemory()
        self._native_bytes = 0
        self._bytes = 0  # of the sealed folder, on its leader

    @property
    def leads(self) -> bool:
        """Whether this rank commits the folder it sees."""
        return self._view.leader == self.rank

    def open(self) -> None:
        """Create the staging folder and find out who sees it."""
        reached("begin")
        self._memory.start()
        self._view = probe(self.staging, self.exchange)
        if self.leads and self.rank != 0:  # rank 0 has cleaned its own view; this one may hold a killed save's files
            for path in self.staging.iterdir():
                folders.remove_tree(path) if path.is_dir() else path.unlink()
        reached("probed")

    def write_weights(self, stock_save: StockSave, state_bytes: int) -> None:
        """Plan, choose the backend, check that it fits, write. `state_bytes`: this rank's optimizer files to come."""
        entries = state_entries(self.trainer)
        self._native_bytes = native_bytes(entries)
        plan, why_not = self._agree_on_plan(stock_save)
        reached("planned")
        self.backend, self.reason = self._choose(plan, why_not, entries, state_bytes)
        reached("weights-started")
        with self.reporting("weights"):
            if plan is None or self.backend == "native-safe":
                if self.rank == 0 and plan is not None:
                    for name in plan.files:
                        (self.staging / name).unlink(missing_ok=True)
                save_native(self.trainer, stock_save, self.staging)
            else:
                self._write_planned(plan, entries)
        reached("weights-written")

    @contextmanager
    def reporting(self, step: str) -> Iterator[None]:
        """Run a part of the save; whatever this rank can't do aborts the save on every rank alike."""
        error: str | None = None
        try:
            yield
        except SaveAborted:
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        self.exchange.round(step, None, error)

    def add_extents(self, extents: Extents) -> None:
        """Files that this rank wrote besides weights, with their checksums."""
        self._extents.update(extents)

    def seal(self, step: int | None) -> None:
        """Make everything in staging durable and write its manifest; from here on it is a whole checkpoint.

        Its leader may then move the folder at any moment: nobody else may look into it any more.
        """
        with self.reporting("parts"):
            leave_part(self.staging, self.rank, self._extents)
        with self.reporting("manifest"):
            if self.leads:
                self._bytes = seal(self.staging, step, self.world_size, self.backend).total_bytes
        reached("manifest-written")

    def report(self, folder: Path) -> SaveReport:
        """The figures of this save, the same on every rank; `bytes` are those of the folder rank 0 sees."""
        answers = self.exchange.round("report", [self._memory.extra_bytes(), self._bytes], decide=list)
        self.exchange.settle()
        known = [peak for peak, _ in answers if peak is not None]
        return SaveReport(
            folder=str(folder),
            backend=self.backend,
            reason=self.reason,
            bytes=answers[0][1],
            seconds=time.monotonic() - self._started,
            peak_extra_bytes=max(known) if known else None,
            native_bytes=self._native_bytes,
            native_leak_bytes=2 * self._native_bytes,
        )

    def _agree_on_plan(self, stock_save: StockSave) -> tuple[Plan | None, str]:
        answer: list[Any] | None = None
        error: str | None = None
        if self.rank == 0:
            try:
                if self.config.mode == "native-safe":
                    raise NotPlannable("asked for by DPOFIT_GUARD")
                answer = [plan_save(self.trainer, stock_save, self.staging).to_json(), ""]
            except NotPlannable as reason:
                answer = [None, str(reason)]
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        plan, why_not = self.exchange.round("plan", answer, error, decide=lambda answers: answers[0])
        return (None if plan is None else Plan.from_json(plan)), why_not

    def _choose(
        self, plan: Plan | None, why_not: str, entries: dict[str, torch.Tensor], state_bytes: int
    ) -> tuple[Backend, str]:
        not_direct = None if plan is None else self._why_not_direct(plan, entries)
        needs = needs_here(self.staging, self._view.leader, state_bytes)

        def decide(answers: list[Any]) -> list[str]:
            reasons = [answer[0] for answer in answers if answer[0] is not None]
            backend, reason = _choose_backend(self.config, plan is not None, why_not, reasons, self._view.shared)
            weights = self._native_bytes if plan is None else plan.total_bytes
            held = self._native_bytes if backend == "native-safe" else 0
            check_room([Needs(*answer[1]) for answer in answers], self.config, weights, held)
            return [backend, reason]

        payload = [not_direct, needs.to_json()]
        backend, reason = self.exchange.round("choose", payload, decide=decide)
        return backend, reason

    def _why_not_direct(self, plan: Plan, entries: dict[str, torch.Tensor]) -> str | None:
        try:
            for source in {planned.source for planned in plan.tensors}:
                span(entries[source], self.rank, self.world_size)
        except NotDirect as reason:
            return str(reason)
        return None

    def _write_planned(self, plan: Plan, entries: dict[str, torch.Tensor]) -> None:
        with weights_bar(plan.total_bytes if self.rank == 0 else 0, self.world_size, self.backend) as progress:
            job = WeightsJob(plan, entries, self.staging, self.config, self.rank, self.world_size, progress)
            if self.backend == "direct":
                self.add_extents(write_direct(job))
            elif self.backend == "routed":
                with _gloo_group(self.config.timeout_s, self.world_size) as group:
                    self.add_extents(write_routed(job, group))
            else:
                self.add_extents(_gathered(job, getattr(self.trainer, "deepspeed", None)))


def _choose_backend(
    config: GuardConfig, planned: bool, why_not: str, not_direct: list[str], shared: bool
) -> tuple[Backend, str]:
    asked = "" if config.mode == "auto" else f"; {config.mode} was asked for"
    if not planned:
        return "native-safe", why_not + (asked if config.mode != "native-safe" else "")
    if not_direct:
        return "gather", not_direct[0] + (asked if config.mode != "gather" else "")
    if config.mode in ("gather", "routed"):
        return ("gather" if config.mode == "gather" else "routed"), "asked for by DPOFIT_GUARD"
    if not shared:
        return "routed", "not all ranks see one folder" + (asked if config.mode == "direct" else "")
    return "direct", "every rank reads back what the others write"


def _gathered(job: WeightsJob, engine: Any) -> Extents:
    optimizer: Any = getattr(engine, "optimizer", None)
    if hasattr(optimizer, "checkpoint_event_prologue"):  # all parameters partitioned, as the stock save begins
        optimizer.checkpoint_event_prologue()
    try:
        return write_gather(job)
    finally:
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()


@contextmanager
def _gloo_group(timeout_s: float, world_size: int) -> Iterator[Any]:
    """A group for one save only: one that broke with a dead peer is never met again."""
    if world_size == 1:
        yield None
        return
    from datetime import timedelta

    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield group
    finally:
        torch.distributed.destroy_process_group(group)


def record(report: SaveReport, output_dir: Path, step: int | None) -> None:
    """Append the report to `output_dir/dpofit/saves.jsonl`."""
    place = output_dir / "dpofit"
    place.mkdir(parents=True, exist_ok=True)
    document = {"schema": "dpofit.save/1", "step": step, "time": time.time(), **_fields(report)}
    with (place / "saves.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(document) + os.linesep)


def _fields(report: SaveReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in SaveReport.__slots__}
