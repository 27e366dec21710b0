"""`dpofit verify` says which checkpoints are whole and what is wrong with the others; `dpofit repair` rebuilds them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guard.ranks import run_ranks, values
from tests.guard.runs import Run, train

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a guarded checkpoint-1 and final model; shards of 32 KiB."""
    folder = tmp_path_factory.mktemp("saved")
    values(run_ranks(train, 2, Run(str(folder), steps=1, max_shard_bytes=32 * 1024)))
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by the stock save."""
    folder = tmp_path_factory.mktemp("stock")
    values(run_ranks(train, 2, Run(str(folder), steps=1, guarded=False)))
    return folder


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    """The command line in a process of its own, which has the stack imported already."""
    import contextlib
    import io

    from dpofit.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def dpofit(*arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    code, out, err = values(run_ranks(run_command, 1, [*map(str, arguments), "--json"]))[0]
    return code, json.loads(out.splitlines()[-1]) if out.strip() else {}, err


def ids(document: dict) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model*.safetensors"))[0]


def test_guarded_saves_are_whole(saved: Path) -> None:
    for folder in (saved / "checkpoint-1", saved):
        code, document, _ = dpofit("verify", folder)
        assert (code, document["findings"]) == (0, [])
        assert document["whole"] is True and document["manifest"] is True


def test_a_stock_save_is_checked_as_far_as_it_goes(stock: Path) -> None:
    code, document, _ = dpofit("verify", stock / "checkpoint-1")
    assert code == 0
    assert ids(document) == {"save.no-manifest"}


def test_people_get_sentences(saved: Path) -> None:
    code, out, _ = values(run_ranks(run_command, 1, ["verify", str(saved / "checkpoint-1")]))[0]
    assert code == 0
    assert "whole (every byte matches its manifest)" in out


def flip_a_byte(folder: Path) -> None:
    path = first_shard(folder)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def flip_an_optimizer_byte(folder: Path) -> None:
    path = next(folder.glob("global_step1/*optim_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(folder: Path) -> None:
    os.truncate(first_shard(folder), first_shard(folder).stat().st_size - 7)


def lose_a_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def lose_the_rng_state(folder: Path) -> None:
    (folder / "rng_state_1.pth").unlink()


def break_a_header(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def shrink_the_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))


def lose_a_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (flip_a_byte, {"save.checksum"}),
        (flip_an_optimizer_byte, {"save.checksum"}),
        (cut_short, {"save.wrong-size"}),
        (lose_a_shard, {"save.missing-shard", "save.missing-file", "save.not-this-model"}),
        (lose_the_rng_state, {"save.missing-file"}),
        (break_a_header, {"save.bad-header", "save.missing-tensor", "save.checksum", "save.not-this-model"}),
        (shrink_the_vocabulary, {"save.wrong-size", "save.checksum", "save.not-this-model"}),
        (lose_a_layer, {"save.wrong-size", "save.checksum", "save.not-this-model"}),
    ],
)
def test_damage_is_found(tmp_path: Path, saved: Path, damage: Callable[[Path], None], found: set[str]) -> None:
    folder = tmp_path / "a checkpoint"
    shutil.copytree(saved / "checkpoint-1", folder)
    damage(folder)
    code, document, _ = dpofit("verify", folder)
    assert code == 1
    assert ids(document) & found and ids(document) <= found


def test_zero3_placeholders_are_found(tmp_path: Path, stock: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(stock / "checkpoint-1", tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    save_file({name: torch.empty(0, dtype=torch.bfloat16) for name in tensors}, tmp_path / "c" / "model.safetensors")
    code, document, _ = dpofit("verify", tmp_path / "c")
    assert code == 1 and "save.empty-tensors" in ids(document)


def test_a_hole_of_zeros_is_found_without_a_manifest(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weight = torch.randn(512, 512)
    weight[100:200] = 0  # 204,800 bytes that a rank never wrote
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, tmp_path / "model.safetensors")
    code, document, _ = dpofit("verify", tmp_path)
    assert code == 1 and "save.zero-hole" in ids(document)


def test_only_zero_files_is_found_and_repaired_bit_for_bit(tmp_path: Path, stock: Path) -> None:
    broken = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(stock / "checkpoint-1", broken)
    original = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").unlink()
    code, document, _ = dpofit("verify", broken)
    assert code == 1 and ids(document) == {"save.only-zero-files"}

    code, document, error = dpofit("repair", broken, tmp_path / "out")
    assert (code, document.get("findings")) == (0, []), error
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == original
    assert dpofit("verify", tmp_path / "out")[0] == 0


REPAIRED = {
    "zero 2": Run("", zero=2, steps=1, vocab=259),
    "tied": Run("", zero=3, steps=1, tied=True),
    "offloaded, with a buffer": Run("", zero=3, steps=1, offload=True, buffer=True),
    "lora": Run("", zero=3, steps=1, lora=True),
    "zero 1, frozen layers": Run("", zero=1, steps=1, freeze=True),
    "fp16": Run("", zero=3, steps=1, fp16=True),
}
if os.environ.get("DPOFIT_TEST_ALL"):
    REPAIRED |= {
        "zero 2, lora": Run("", zero=2, steps=1, lora=True),
        "zero 2, frozen layers": Run("", zero=2, steps=1, freeze=True),
        "frozen layers in fp32": Run("", zero=3, steps=1, freeze=True, bf16=False),
    }


@pytest.mark.parametrize("run", REPAIRED.values(), ids=REPAIRED)
def test_repair_gives_back_what_the_stock_save_wrote(tmp_path: Path, run: Run) -> None:
    from dataclasses import replace

    values(run_ranks(train, 3, replace(run, output_dir=str(tmp_path / "run"), guarded=False, final_save=False)))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    name = "adapter_model.safetensors" if run.lora else "model.safetensors"
    original = (checkpoint / name).read_bytes()
    (checkpoint / name).unlink()
    code, document, error = dpofit("repair", checkpoint, tmp_path / "out")
    assert code == 0, (document, error)
    from safetensors.torch import load

    before, after = load(original), load((tmp_path / "out" / name).read_bytes())
    if run.zero == 2:  # the stock save breaks the tie; repair follows config.json
        before = {key: before[key] for key in after}
    assert before.keys() == after.keys()
    assert all((before[key].view(-1) == after[key].view(-1)).all() for key in before)


def load_two(one: str, other: str) -> tuple[bool, list[dict[str, Any]]]:
    """Whether two folders load to the same model, and what from_pretrained missed or didn't expect in each."""
    import torch
    from transformers import AutoModelForImageTextToText

    models, infos = zip(
        *(AutoModelForImageTextToText.from_pretrained(place, output_loading_info=True) for place in (one, other)),
        strict=True,
    )
    first, second = (model.state_dict() for model in models)
    same = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return same, [{key: sorted(map(str, value)) for key, value in info.items() if value} for info in infos]


def test_a_repaired_model_with_a_vision_tower_loads_like_the_saved_one(tmp_path: Path) -> None:
    # transformers 5 renames such models' weights when it saves and loads; ZeRO files have the module's own names
    run = Run(str(tmp_path / "run"), zero=3, steps=1, vision=True, guarded=False, final_save=False)
    values(run_ranks(train, 2, run))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    code, document, error = dpofit("repair", checkpoint, tmp_path / "out")
    assert code == 0, (document, error)
    assert values(run_ranks(load_two, 1, str(checkpoint), str(tmp_path / "out"))) == [(True, [{}, {}])]


def without_weights(stock: Path, place: Path) -> Path:
    shutil.copytree(stock / "checkpoint-1", place)
    (place / "model.safetensors").unlink()
    return place


def repair_and_die(arguments: list[str], call: str, times: int) -> None:
    """The command, killed at the `times`-th call of BoundedFile.write or Path.rename."""
    import signal

    from dpofit.train.guard.writer import BoundedFile

    owner = BoundedFile if call == "write" else Path
    stock_call, seen = getattr(owner, call), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(call)
        if len(seen) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock_call(*args, **kwargs)

    setattr(owner, call, counted)
    run_command(arguments)


KILLS = [("write", 3), ("rename", 3)]
if os.environ.get("DPOFIT_TEST_ALL"):
    KILLS += [("write", 1), ("rename", 1), ("rename", 2), ("rename", 4)]


@pytest.mark.parametrize(("call", "times"), KILLS)
def test_a_killed_repair_can_be_run_again(tmp_path: Path, stock: Path, call: str, times: int) -> None:
    broken, out = without_weights(stock, tmp_path / "c"), tmp_path / "out"
    (killed,) = run_ranks(repair_and_die, 1, ["repair", str(broken), str(out)], call, times)
    assert killed.exitcode == -9
    assert list(out.glob(".dpofit-*")) != []
    code, document, error = dpofit("repair", broken, out)
    assert (code, document.get("findings")) == (0, []), error
    original = (stock / "checkpoint-1" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == original
    assert list(out.glob(".dpofit-*")) == []


def repair_onto_a_small_disk(broken: str, place: str) -> tuple[int, str, list[str]]:
    from tests.guard.test_faults import _private_mounts

    libc = _private_mounts()
    assert libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=64k") == 0
    code, _, err = run_command(["repair", broken, f"{place}/out"])
    return code, err, sorted(os.listdir(place))


@pytest.mark.usefixtures("needs_mounts")
def test_repair_onto_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path, stock: Path) -> None:
    broken = without_weights(stock, tmp_path / "c")
    (tmp_path / "small").mkdir()
    (end,) = values(run_ranks(repair_onto_a_small_disk, 1, str(broken), str(tmp_path / "small")))
    code, error, left = end
    assert code == 2 and "bytes, " in error and "are free" in error and "Traceback" not in error
    assert left == []


def test_repair_takes_the_newest_step_whatever_latest_names(tmp_path: Path, stock: Path) -> None:
    broken = without_weights(stock, tmp_path / "c")
    (broken / "global_step1").rename(broken / "global_step10")
    (broken / "global_step9").mkdir()
    (broken / "latest").write_text("../elsewhere")
    code, _, error = dpofit("repair", broken, tmp_path / "out")
    assert code == 0, error


def test_repair_names_a_file_that_is_not_laid_out_as_it_should_be(tmp_path: Path, stock: Path) -> None:
    import torch

    broken = without_weights(stock, tmp_path / "c")
    torch.save({"something": 1}, next(broken.glob("global_step1/*rank_0*optim_states.pt")))
    code, _, error = dpofit("repair", broken, tmp_path / "out")
    assert code == 2 and "is not laid out like ZeRO files" in error and "Traceback" not in error


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_torch_files_of_a_stock_save_are_checked_by_their_own_crcs(tmp_path: Path, stock: Path, damage: str) -> None:
    shutil.copytree(stock / "checkpoint-1", tmp_path / "c")
    victim = next(tmp_path.glob("c/global_step1/*rank_0*optim_states.pt"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data if damage == "flip" else data[:-100])
    code, document, _ = dpofit("verify", tmp_path / "c")
    assert code == 1 and ids(document) == {"save.no-manifest", "save.torch-file"}


def load_both_ways(folder: str) -> tuple[bool, dict[str, Any]]:
    """Whether `from_pretrained` and a loader that follows the index with safe_open read the same, all of it."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    where = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    same = True
    for name, tensor in model.state_dict().items():
        with safe_open(Path(folder) / where[name], framework="pt") as file:
            same = same and torch.equal(file.get_tensor(name), tensor)
    return same, {key: sorted(map(str, value)) for key, value in info.items() if value}


def test_from_pretrained_and_index_readers_load_every_tensor(saved: Path) -> None:
    for folder in (saved, saved / "checkpoint-1"):
        assert values(run_ranks(load_both_ways, 1, str(folder))) == [(True, {})]


def test_repair_refuses_what_is_not_a_zero_file(tmp_path: Path, stock: Path) -> None:
    import torch

    broken = tmp_path / "c"
    shutil.copytree(stock / "checkpoint-1", broken)
    victim = next(broken.glob("global_step1/*rank_0*optim_states.pt"))
    torch.save({"optimizer_state_dict": Run("")}, victim)
    code, _, error = dpofit("repair", broken, tmp_path / "out")
    assert code == 2
    assert "tests.guard.runs.Run" in error and "Traceback" not in error


def test_repair_names_the_missing_rank(tmp_path: Path, stock: Path) -> None:
    broken = tmp_path / "c"
    shutil.copytree(stock / "checkpoint-1", broken)
    next(broken.glob("global_step1/*rank_0*optim_states.pt")).unlink()
    code, _, error = dpofit("repair", broken, tmp_path / "out")
    assert code == 2 and "lacks the files of ranks 0" in error


def test_repair_overwrites_nothing(tmp_path: Path, stock: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, _, error = dpofit("repair", stock / "checkpoint-1", tmp_path)
    assert code == 2 and "is not empty" in error
