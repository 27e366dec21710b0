"""Twenty steps of LLaMA-Factory with tiled_mlp, offload_checkpoints or cached_reference are stock's."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

torch = pytest.importorskip("torch")

from dpofit.train.longdpo import offload_checkpoints, tiled_mlp  # noqa: E402
from tests.longdpo.runs import Case, Seen, gradient_error, logp_error, loss_error, reference_error, run  # noqa: E402

ALL = bool(os.environ.get("DPOFIT_TEST_ALL"))
CASES = {"full": Case(batch=2, accumulation=2), "lora": Case(tuning="lora", batch=2, accumulation=2)}
PIECES = ("tiled_mlp", "offload_checkpoints", "cached_reference")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiled_mlp, "TILE_TOKENS", 16)  # else the short rows would be one tile
    yield


@functools.cache
def stock(tuning: str) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        return run(CASES[tuning], (), Path(folder))


def test_stock_begins_at_ln_2() -> None:
    losses = stock("full").losses
    assert len(losses) == 40
    assert losses[0] * 2 == pytest.approx(0.6931472, abs=1e-6)  # half of it: two micro-batches a step


@pytest.mark.parametrize("tuning", CASES if ALL else ["full"])
def test_tiled_mlp(tuning: str, tmp_path: Path) -> None:
    mine = run(CASES[tuning], ("tiled_mlp",), tmp_path)
    theirs = stock(tuning)
    assert max(loss_error(theirs, mine), logp_error(theirs, mine), gradient_error(theirs, mine)) <= 1e-5


@pytest.mark.parametrize("tuning", CASES if ALL else ["full"])
def test_offload_checkpoints_to_the_bit(tuning: str, tmp_path: Path) -> None:
    mine = run(CASES[tuning], ("offload_checkpoints",), tmp_path)
    theirs = stock(tuning)
    assert (loss_error(theirs, mine), logp_error(theirs, mine), gradient_error(theirs, mine)) == (0, 0, 0)
    inputs = offload_checkpoints.layer_inputs(torch.device("cpu"))
    assert inputs.stack.used_bytes == 0, "something is still kept after the last backward"
    assert inputs.stack.held_bytes == 64 * 2**20, "one slab is enough for all these steps"


@pytest.mark.parametrize(
    ("tuning", "pieces"),
    [("full", ("cached_reference",)), ("lora", PIECES), *([("lora", ("cached_reference",)), ("full", PIECES)] * ALL)],
)
def test_cached_reference_alone_and_with_the_others(tuning: str, pieces: tuple[str, ...], tmp_path: Path) -> None:
    mine, theirs = run(CASES[tuning], pieces, tmp_path), stock(tuning)
    assert max(loss_error(theirs, mine), gradient_error(theirs, mine)) <= 1e-5
    assert reference_error(theirs, mine) <= 1e-5
    assert mine.models == 1, "a second model was built"


def test_switching_the_pieces_off_puts_every_stock_function_back() -> None:
    from importlib import import_module
    from operator import attrgetter

    import llamafactory.extras.packages  # noqa: F401  (first: it mends transformers' package lookup, which trl asks)

    from dpofit.train import hooks, longdpo

    def standing(targets: list[str]) -> list[object]:
        return [attrgetter(target.partition(":")[2])(import_module(target.partition(":")[0])) for target in targets]

    longdpo.install(())
    targets = [
        hook.target for piece in PIECES for hook in import_module(f"dpofit.train.longdpo.{piece}").hooks()
    ]  # fmt: skip
    stock = standing(targets)
    longdpo.install(PIECES)
    assert all(one is not other for one, other in zip(standing(targets), stock, strict=True))
    longdpo.install(())
    assert standing(targets) == stock
    assert hooks.installed(longdpo.OWNER) == ()
