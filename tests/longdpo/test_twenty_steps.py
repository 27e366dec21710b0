"""Twenty steps of LLaMA-Factory with tiled_mlp, offload_checkpoints or cached_reference are stock's."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("the_stack_is_no_garbage")]

torch = pytest.importorskip("torch")

from dpofit.train.longdpo import offload_checkpoints  # noqa: E402
from tests.longdpo.conftest import AssertSame  # noqa: E402
from tests.longdpo.runs import Case, Errors, Seen, errors, run  # noqa: E402

ALL = bool(os.environ.get("DPOFIT_TEST_ALL"))
CASES = {"full": Case(batch=2, accumulation=2), "lora": Case(tuning="lora", batch=2, accumulation=2)}
PIECES = ("tiled_mlp", "offload_checkpoints", "cached_reference")


@functools.cache
def stock(case: Case) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        return run(case, (), Path(folder))


def test_stock_begins_at_ln_2() -> None:
    losses = stock(CASES["full"]).losses
    assert len(losses) == 40
    assert losses[0] * 2 == pytest.approx(0.6931472, abs=1e-6)  # half of it: two micro-batches a step


@pytest.mark.parametrize("tuning", CASES if ALL else ["full"])
def test_tiled_mlp(tuning: str, tmp_path: Path, assert_same: AssertSame) -> None:
    case, pieces = CASES[tuning], ("tiled_mlp",)
    assert_same({(case, pieces): errors(stock(case), run(case, pieces, tmp_path))})


@pytest.mark.parametrize("tuning", CASES if ALL else ["full"])
def test_offload_checkpoints_to_the_bit(tuning: str, tmp_path: Path, assert_same: AssertSame) -> None:
    case, pieces = CASES[tuning], ("offload_checkpoints",)
    found = errors(stock(case), run(case, pieces, tmp_path))
    assert_same({(case, pieces): found})
    assert found == Errors(0, 0, 0, 0)
    inputs = offload_checkpoints.layer_inputs(torch.device("cpu"))
    assert inputs.stack.used_bytes == 0, "something is still kept after the last backward"
    assert inputs.stack.held_bytes == 64 * 2**20, "one slab is enough for all these steps"


@pytest.mark.parametrize(
    ("tuning", "pieces"),
    [("full", ("cached_reference",)), ("lora", PIECES), *([("lora", ("cached_reference",)), ("full", PIECES)] * ALL)],
)
def test_cached_reference_alone_and_with_the_others(
    tuning: str, pieces: tuple[str, ...], tmp_path: Path, assert_same: AssertSame
) -> None:
    case = CASES[tuning]
    mine = run(case, pieces, tmp_path)
    assert_same({(case, pieces): errors(stock(case), mine)})
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
