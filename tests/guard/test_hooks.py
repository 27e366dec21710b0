"""Patches from several owners stack in their order and come off without a trace."""

from __future__ import annotations

import json

import pytest

from dpofit.train import hooks
from tests.guard.ranks import run_ranks, values


def _tagging(owner: str, tag: str, order: int = 0) -> hooks.Hook:
    def wrap(stock):  # type: ignore[no-untyped-def]
        return lambda value: tag + stock(value)

    return hooks.Hook(owner, "json:dumps", wrap, order)


@pytest.fixture(autouse=True)
def _clean():  # type: ignore[no-untyped-def]
    stock = json.dumps
    yield
    for owner in ("one", "two"):
        hooks.uninstall(owner)
    assert json.dumps is stock


def test_the_higher_order_runs_first_whoever_came_first() -> None:
    hooks.install([_tagging("one", "outer ", order=5)])
    hooks.install([_tagging("two", "inner ", order=1)])
    assert json.dumps(1) == "outer inner 1"


def test_installing_twice_is_installing_once() -> None:
    hooks.install([_tagging("one", "x")])
    hooks.install([_tagging("one", "x")])
    assert json.dumps(1) == "x1"


def test_uninstalling_one_owner_keeps_the_other() -> None:
    hooks.install([_tagging("one", "a")])
    hooks.install([_tagging("two", "b")])
    hooks.uninstall("one")
    assert json.dumps(1) == "b1"


def test_a_module_nobody_imported_stays_unimported() -> None:
    hooks.install([hooks.Hook("one", "this_is_no_module:f", lambda stock: stock, only_if_imported=True)])
    assert hooks.installed("one") == ()


def one_import() -> list[bool]:
    """Whether a fresh process's Trainer is guarded: before the import, after it, after uninstalling."""
    from transformers import Trainer

    seen = [hasattr(Trainer.save_model, "__wrapped__")]
    import dpofit.train.guard.auto  # noqa: F401

    seen.append(hasattr(Trainer.save_model, "__wrapped__"))
    from dpofit.train import guard

    guard.uninstall()
    return [*seen, hasattr(Trainer.save_model, "__wrapped__")]


@pytest.mark.stack
def test_one_import_guards_every_trainer() -> None:
    assert values(run_ranks(one_import, 1)) == [[False, True, False]]
