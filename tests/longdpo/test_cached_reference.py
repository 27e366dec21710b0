"""Log-probs of the reference come from one pass before step 1, and are those that stock computes at every step."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("the_stack_is_no_garbage")]

torch = pytest.importorskip("torch")

from dpofit.errors import BadInput  # noqa: E402
from dpofit.train import hooks  # noqa: E402
from dpofit.train.longdpo import reference_store as store  # noqa: E402
from dpofit.train.longdpo.cached_reference import FOLDER  # noqa: E402
from dpofit.train.longdpo.reference_store import SEALED  # noqa: E402
from tests.guard.ranks import run_ranks, values  # noqa: E402
from tests.longdpo import runs  # noqa: E402
from tests.longdpo.conftest import AssertSame  # noqa: E402
from tests.longdpo.runs import ASSETS, Case, Seen, errors, run  # noqa: E402

PIECE = ("cached_reference",)

CASES = {
    "ipo": Case(loss="ipo", batch=2, steps=4),
    "bco": Case(loss="bco", batch=2, steps=6),
    "ld_alpha": Case(loss="ld_alpha", batch=2, steps=6),
    "kto": Case(stage="kto", batch=2, steps=4),
    "kto-lora": Case(stage="kto", tuning="lora", batch=2, steps=6),
    "freeze": Case(tuning="freeze", batch=2, steps=6, extra=(("freeze_trainable_layers", 1),)),
    "eval": Case(batch=2, steps=6, extra=(
        ("val_size", 3), ("eval_strategy", "steps"), ("eval_steps", 3), ("per_device_eval_batch_size", 2),
    )),
}  # fmt: skip
ALWAYS = ("ipo", "kto", "eval")


@pytest.mark.parametrize("name", CASES if os.environ.get("DPOFIT_TEST_ALL") else ALWAYS)
def test_losses_log_probs_and_gradients_are_stocks(name: str, tmp_path: Path, assert_same: AssertSame) -> None:
    case = CASES[name]
    stock, cached = run(case, (), tmp_path), run(case, PIECE, tmp_path)
    assert_same({(case, PIECE): errors(stock, cached)})
    assert cached.models == 1, "a second model was built"


def test_training_makes_one_forward_a_step_where_stock_makes_two(tmp_path: Path) -> None:
    case = Case(batch=1, steps=3)
    stock, cached = run(case, (), tmp_path), run(case, PIECE, tmp_path)
    pairs = len(json.loads((ASSETS / "pairs.json").read_text()))
    assert stock.forwards == 2 * 3
    assert cached.forwards == 3 + pairs
    assert stock.models == 2


@pytest.fixture(scope="module")
def cache_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.shutil, "rmtree", lambda *args, **kwargs: None)
        run(Case(steps=1), PIECE, folder)
    assert (folder / "out" / FOLDER / SEALED).is_file()
    return folder


@pytest.fixture
def finished(cache_once: Path, tmp_path: Path) -> Path:
    """A folder in which a run has left its cache."""
    shutil.copytree(cache_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def again(folder: Path, pieces: Collection[str] = PIECE, **more: Any) -> Seen:
    for path in (folder / "out").glob("*"):
        if path.is_file():
            path.unlink()
    return run(Case(steps=1), pieces, folder, **more)


def test_a_second_run_computes_nothing(finished: Path) -> None:
    assert again(finished).forwards == 1


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"cutoff_len": 24}, "cutoff_len was 64, is 24; data train was"),
    "method": ({"finetuning_type": "lora"}, "reference was the model itself, full, is the model itself, lora"),
    "evaluation": ({"val_size": 2, "eval_strategy": "steps"}, "data eval was absent"),
    "template": ({"template": "alpaca"}, "template was empty, is alpaca; data train was"),
    "examples": ({"max_samples": 4}, "data train was "),
    "loss": ({"pref_loss": "ipo"}, "log-probs was sum, is mean"),
    "precision": ({"bf16": True}, "precision was bf16 False"),
}
ALWAYS_CHANGED = ("length", "method", "evaluation")


@pytest.mark.parametrize("what", CHANGES if os.environ.get("DPOFIT_TEST_ALL") else ALWAYS_CHANGED)
def test_a_cache_of_another_run_is_refused_by_what_has_changed(what: str, finished: Path) -> None:
    change, named = CHANGES[what]
    with pytest.raises(BadInput, match=f"{re.escape(named)}.*delete .*reference"):
        again(finished, **change)


def test_a_cache_of_a_model_trained_since_is_refused(finished: Path) -> None:
    (weights,) = (path for path in finished.glob("*/model.safetensors") if path.parent.name != "out")
    data = bytearray(weights.read_bytes())
    for place in range(len(data) // 2, len(data), 4096):
        data[place] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BadInput, match=r"model model.safetensors was \d+ bytes"):
        again(finished)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_cache_made_by_other_code_is_refused(finished: Path) -> None:
    folder = finished / "out" / FOLDER
    key, whole = sealed(folder)
    assert {"dpofit", "llamafactory", "transformers", "torch"} <= key.keys()
    for package in ("dpofit", "transformers"):
        store.seal(folder, {**key, package: "0.0.1"}, whole)
        named = re.escape(f"reference log-probs was made for something else: {package} was 0.0.1, is {key[package]}.")
        with pytest.raises(BadInput, match=f"{named}.*delete .*reference"):
            again(finished)


def test_a_cache_that_lacks_rows_is_refused(finished: Path) -> None:
    folder = finished / "out" / FOLDER
    key, whole = sealed(folder)
    store.seal(folder, key, dict(list(whole.items())[2:]))
    with pytest.raises(BadInput, match=r"lacks 2 of \d+ rows"):
        again(finished)


@pytest.mark.parametrize("place", [3, -1, -200], ids=["header", "value", "row"])
def test_a_damaged_cache_is_refused(place: int, finished: Path) -> None:
    folder = finished / "out" / FOLDER
    key, _ = sealed(folder)
    flip(folder / SEALED, place)
    with pytest.raises(BadInput, match=r"is damaged .*delete "):
        store.read(folder, key)


def sealed(folder: Path) -> tuple[dict[str, str], store.Values]:
    from safetensors import safe_open

    with safe_open(folder / SEALED, "numpy") as file:
        key = json.loads(file.metadata()["key"])
    return key, store.read(folder, key).values


def killed_in_the_pass(folder: str) -> None:
    """Dies while its fourth pair is being written."""
    from dpofit.train.longdpo.reference_store import Lines
    from tests.guard import stack  # noqa: F401

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    stock, seen = Lines._write, 0

    def write(lines: Lines, text: str) -> None:
        nonlocal seen
        seen += 1
        if seen == 8:  # header, then two rows a pair
            lines._file.write("0badc0de half a li")
            lines._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        stock(lines, text)

    Lines._write = write  # type: ignore[method-assign]
    run(Case(steps=2), PIECE, Path(folder))


def test_a_killed_pass_goes_on_where_it_was(tmp_path: Path, assert_same: AssertSame) -> None:
    (result,) = run_ranks(killed_in_the_pass, 1, str(tmp_path))
    assert result.exitcode == -signal.SIGKILL
    partial = tmp_path / "out" / FOLDER / "partial.0.0.jsonl"
    assert partial.read_text().count("\n") == 7
    stock = run(Case(steps=2), (), tmp_path / "stock")
    cached = run(Case(steps=2), PIECE, tmp_path)
    pairs = len(json.loads((ASSETS / "pairs.json").read_text()))
    assert cached.forwards == 2 + pairs - 3
    assert_same({(Case(steps=2), PIECE): errors(stock, cached)})


def test_lines_of_another_run_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    key = {"cutoff_len": "64"}
    with store.Lines(tmp_path, 0, key) as lines:
        lines.add({b"a" * 16: -1.5, b"b" * 16: -2.25})
    assert store.read(tmp_path, key).values == {b"a" * 16: -1.5, b"b" * 16: -2.25}
    with pytest.raises(BadInput, match="cutoff_len was 64, is 32"):
        store.read(tmp_path, {"cutoff_len": "32"})
    flip(tmp_path / "partial.0.0.jsonl", -20)
    with pytest.raises(BadInput, match=r"is damaged \(line 3\)"):
        store.read(tmp_path, key)


def saving(folder: Path, **more: Any) -> dict[str, Any]:
    return {"save_strategy": "steps", "save_steps": 2, **more}


def test_a_resumed_run_reads_the_cache_and_without_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs.shutil, "rmtree", lambda *args, **kwargs: None)
    whole = run(Case(steps=4), PIECE, tmp_path / "whole")
    run(Case(steps=4), PIECE, tmp_path, **saving(tmp_path))
    resume = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-2"), "save_strategy": "no"}
    resumed = run(Case(steps=4), PIECE, tmp_path, **resume)
    assert resumed.losses == whole.losses[2:]
    assert resumed.forwards == 2
    elsewhere = run(Case(steps=4), PIECE, tmp_path, **resume, output_dir=str(tmp_path / "elsewhere"))
    assert elsewhere.losses == whole.losses[2:]
    assert elsewhere.forwards == 2
    (tmp_path / "out" / FOLDER / SEALED).unlink()
    with pytest.raises(BadInput, match="training resumes at step 2, where the model is no longer its own reference"):
        run(Case(steps=4), PIECE, tmp_path, **resume)


def test_a_given_reference_is_loaded_for_the_pass_only(tmp_path: Path, assert_same: AssertSame) -> None:
    other = tmp_path / "other"
    base = runs.make_model(Case(), tmp_path)
    shutil.copytree(base, other)
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    save_file({name: one * 0.5 for name, one in weights.items()}, other / "model.safetensors", {"format": "pt"})
    case = Case(steps=3, batch=2, extra=(("ref_model", str(other)),))
    stock = run(case, (), tmp_path)
    others = weakref.WeakSet(models_alive())
    cached = run(case, PIECE, tmp_path)
    assert abs(stock.losses[0] - 0.693147) > 0.01, "this reference must be another one for the test to tell"
    assert_same({(case, PIECE): errors(stock, cached)})
    assert cached.models == 2
    assert [one for one in models_alive() if one not in others] == []


def models_alive() -> list[Any]:
    """Every model of this process, those that other tests keep for their own use among them."""
    from transformers import PreTrainedModel

    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, PreTrainedModel)]


def test_lora_with_noise_on_the_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neftune_noise_alpha"):
        run(Case(tuning="lora", steps=1), PIECE, tmp_path, neftune_noise_alpha=5)


def two_ranks(folder: str) -> tuple[list[float], list[float], int, str]:
    """Two DDP ranks: what one of them lost with stock code and with the cache, how many forwards it made, and why it
    refused to go on after that with other data."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from tests.guard import stack  # noqa: F401

    case, mine = Case(tuning="lora", batch=2, steps=2), Path(folder) / os.environ["RANK"]
    mine.mkdir()
    shared = {"output_dir": f"{folder}/out", "ddp_backend": "gloo"}
    hooks.install([hooks.Hook("two", "torch.distributed:destroy_process_group", lambda stock: lambda *args: None)])
    found, why = [], ""
    for pieces, more in (((), {}), (PIECE, {}), (PIECE, {"max_samples": 5})):
        for path in Path(folder, "out").glob("*.*"):
            path.unlink(missing_ok=True)
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
        try:
            found.append(run(case, pieces, mine, **shared, **more))
        except BadInput as refused:
            why = str(refused)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    stock, cached = found
    return stock.losses, cached.losses, cached.forwards, why


def test_two_ranks_share_the_pass_and_one_cache_which_serves_one_rank_too(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    results = values(run_ranks(two_ranks, 2, str(tmp_path)))
    pairs = len(json.loads((ASSETS / "pairs.json").read_text()))
    for stock, cached, forwards, why in results:
        assert cached == pytest.approx(stock, rel=1e-5)
        assert forwards == 2 + -(-pairs // 4)  # batches of two, on two ranks
        assert "data train was" in why, "every rank must refuse, not wait for the others"
    assert sorted(path.name for path in (tmp_path / "out" / FOLDER).iterdir()) == [SEALED]
    # What two ranks have made serves one, which has other pairs in its batches.
    alone, case = tmp_path / "alone", Case(tuning="lora", batch=2, steps=2)
    shutil.copytree(tmp_path / "out" / FOLDER, alone / "out" / FOLDER)
    found = run(case, PIECE, alone)
    assert found.forwards == 2
    assert_same({(case, PIECE): errors(run(case, (), tmp_path), found)})
