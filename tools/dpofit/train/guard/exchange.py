"""One round of the save protocol: every rank reports, one verdict comes back, the same on every rank.

The reports go through the job's own key-value store, not through a process group: a rank that is late or dead
leaves no half-finished collective behind, so the others can abort the save and go on training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol


class SaveAborted(RuntimeError):
    """Some rank could not do its part; raised on every rank, with the reason of each failing rank."""

    def __init__(self, step: str, reasons: dict[int, str]) -> None:
        self.step = step
        self.reasons = reasons
        text = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
        super().__init__(f"save aborted at {step}: {text}")


class Store(Protocol):
    """The part of torch.distributed.Store that a round uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


Decide = Callable[[list[Any]], Any]


def first(payloads: list[Any]) -> Any:
    """A `decide` that hands every rank what rank 0 reported."""
    return payloads[0]


class Exchange:
    """The rounds of one process; `rank` of `world_size`. All ranks must run the same rounds in the same order."""

    def __init__(self, store: Store | None, rank: int, world_size: int, timeout_s: float) -> None:
        if store is None and world_size != 1:
            raise ValueError("more than one rank needs a store")
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store = store
        self._round = 0
        self._stale: list[str] = []

    def use(self, store: Store, timeout_s: float) -> None:
        """Go on with the store and patience of a new process group; round numbers go on too."""
        self._store, self.timeout_s = store, timeout_s

    def round(self, step: str, payload: Any = None, error: str | None = None, decide: Decide | None = None) -> Any:
        """Report `payload` or `error`; return rank 0's `decide(payloads)`, or raise SaveAborted on every rank.

        Payloads and the decision travel as JSON. A rank that doesn't report within `timeout_s` fails the round.
        """
        if self._store is None:
            if error is not None:
                raise SaveAborted(step, {0: error})
            return decide([payload]) if decide else None
        self._round += 1
        # The key names the round, not the step: a rank that failed early meets the others wherever they are.
        prefix = f"dpofit/guard/{self._round}"
        verdict_key = f"{prefix}/verdict"
        if self.rank == 0:
            verdict = self._decide(self._store, prefix, payload, error, decide)
        else:
            self._store.set(f"{prefix}/{self.rank}", json.dumps({"error": error, "payload": payload}))
            verdict = self._await(self._store, verdict_key)
        # First writer wins: a rank that gave up and a rank 0 that was merely slow must not disagree.
        settled = json.loads(self._store.compare_set(verdict_key, "", json.dumps(verdict)))
        if self.rank == 0:
            self._tidy(self._store, verdict_key)
        if settled["errors"]:
            raise SaveAborted(step, {int(rank): text for rank, text in settled["errors"].items()})
        return settled["decision"]

    def settle(self) -> None:
        """Let rank 0, which may host the store, go on (and exit) only once every rank has read the last verdict."""
        if self._store is None:
            return
        if self.rank != 0:
            self._store.set(f"dpofit/guard/{self._round}/read/{self.rank}", "1")
            return
        for rank in range(1, self.world_size):
            key = f"dpofit/guard/{self._round}/read/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=min(self.timeout_s, 60)))
            except Exception:  # a rank that died after the save: not this save's business
                return
            self._store.delete_key(key)

    def _decide(self, store: Store, prefix: str, payload: Any, error: str | None, decide: Decide | None) -> dict:
        errors: dict[int, str] = {} if error is None else {0: error}
        payloads = [payload]
        deadline = time.monotonic() + self.timeout_s
        for rank in range(1, self.world_size):
            key = f"{prefix}/{rank}"
            left = max(0.001, deadline - time.monotonic())
            try:
                store.wait([key], timedelta(seconds=left))
            except Exception as missing:  # torch raises DistStoreError or RuntimeError, by store and version
                errors[rank] = f"no answer within {self.timeout_s:g} s ({type(missing).__name__})"
                payloads.append(None)
                continue
            report = json.loads(store.get(key))
            store.delete_key(key)
            if report["error"] is not None:
                errors[rank] = report["error"]
            payloads.append(report["payload"])
        decision = None
        if not errors and decide is not None:
            try:
                decision = decide(payloads)
            except Exception as failure:
                errors[0] = f"{type(failure).__name__}: {failure}"
        return {"errors": errors, "decision": decision}

    def _await(self, store: Store, verdict_key: str) -> dict:
        # Rank 0 may itself wait `timeout_s` for the slowest rank, and then needs a moment to decide.
        patience_s = 2 * self.timeout_s + 5
        try:
            store.wait([verdict_key], timedelta(seconds=patience_s))
        except Exception as missing:
            return {"errors": {0: f"no verdict within {patience_s:g} s ({type(missing).__name__})"}, "decision": None}
        return json.loads(store.get(verdict_key))

    def _tidy(self, store: Store, verdict_key: str) -> None:
        # The verdict before the last has been read by all: each rank reported to the last round after reading it.
        self._stale.append(verdict_key)
        if len(self._stale) > 2:
            store.delete_key(self._stale.pop(0))
