"""A round ends the same way on every rank, whatever one of them does. Real torch stores, one thread a rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dpofit.train.guard.exchange import Exchange, SaveAborted

pytestmark = pytest.mark.stack


def run(world_size: int, act: Callable[[Exchange], Any], timeout_s: float = 1.0) -> list[Any]:
    import torch.distributed as dist

    store = dist.HashStore()

    def one(rank: int) -> Any:
        try:
            return act(Exchange(store, rank, world_size, timeout_s))
        except SaveAborted as aborted:
            return aborted.reasons

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def test_everyone_gets_rank_0s_decision() -> None:
    assert run(3, lambda exchange: exchange.round("sum", exchange.rank, decide=sum)) == [3, 3, 3]


def test_one_error_aborts_on_all_with_its_reason() -> None:
    def act(exchange: Exchange) -> Any:
        return exchange.round("write", None, "disk full" if exchange.rank == 2 else None)

    assert run(3, act) == [{2: "disk full"}] * 3


def test_a_late_rank_learns_that_the_others_gave_up() -> None:
    def act(exchange: Exchange) -> Any:
        if exchange.rank == 1:
            time.sleep(1.5)
        return exchange.round("write")

    results = run(3, act, timeout_s=0.5)
    assert results[0] == results[1] == results[2]
    assert set(results[0]) == {1}


def test_after_an_abort_the_next_round_works() -> None:
    def act(exchange: Exchange) -> Any:
        with pytest.raises(SaveAborted):
            exchange.round("write", None, "no" if exchange.rank == 0 else None)
        return exchange.round("again", exchange.rank, decide=list)

    assert run(2, act) == [[0, 1], [0, 1]]


def test_a_decision_that_fails_aborts_on_all() -> None:
    def refuse(payloads: list[Any]) -> Any:
        raise OSError("no room")

    results = run(2, lambda exchange: exchange.round("choose", 1, decide=refuse))
    assert results == [{0: "OSError: no room"}] * 2


def test_alone_there_is_nothing_to_wait_for() -> None:
    assert Exchange(None, 0, 1, 1.0).round("sum", 4, decide=sum) == 4
