"""`dpofit list`, `show` and `copy`, run as a person runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dpofit.recipe.cards import CatalogueEntry, all_recipes
from dpofit.recipe.catalogue import catalogue_root
from dpofit.recipe.long_context import PIECES

Run = Callable[..., tuple[int, str, str]]


def test_list_shows_every_recipe_in_100_columns(dpofit: Run) -> None:
    code, out, _ = dpofit("list")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    first_words = [line.split()[0] for line in lines if line.split()]
    for entry in all_recipes():
        assert entry.file.name in first_words


def test_list_puts_the_documented_limit_in_the_recipes_row(dpofit: Run) -> None:
    _, out, _ = dpofit("list")
    rows = {line.split()[0]: line.split()[1:] for line in reversed(out.splitlines()) if line.split()}
    assert rows["full-z3-offload-liger-unsloth-gc"] == [
        "full", "3,", "all", "on", "CPU", "4x8", "h200-141g", "13,824", "12,800",
    ]  # fmt: skip


def test_list_json_holds_what_the_table_holds(dpofit: Run) -> None:
    _, out, _ = dpofit("list", "--json")
    document = json.loads(out)
    assert document["schema"] == "dpofit.list/1"
    assert len(document["recipes"]) == len(all_recipes())
    [row] = [row for row in document["recipes"] if row["name"] == "qlora-1gpu"]
    del row["path"]
    assert row == {
        "recipe": "qwen2.5-7b-dpo/qlora-1gpu",
        "family": "qwen2.5-7b-dpo",
        "name": "qlora-1gpu",
        "version": 1,
        "title": "4-bit LoRA on one GPU, Liger",
        "preset": "qlora-1gpu",
        "stage": "dpo",
        "pref_loss": "sigmoid",
        "finetuning_type": "lora",
        "quantization_bit": 4,
        "deepspeed": None,
        "hardware": {"nodes": 1, "gpus_per_node": 1, "gpu": "rtx4090", "host_ram": "64GiB"},
        "long_context": [],
        "cutoff_len": 2048,
        "documented": None,
    }


def test_show_gives_reasons_limit_history_and_yaml(dpofit: Run) -> None:
    code, out, _ = dpofit("show", "full-z3-offload-liger-unsloth-gc")
    assert code == 0
    text = " ".join(out.split())
    assert "documented 12,800 prompt tokens (2024 field notes, preset 3" in text
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: batches of different lengths leave holes" in text
    assert "history In 2024: preset 2 with ZeRO-3 offload" in text
    assert "v1 first release" in text
    yaml_text = (catalogue_root() / "recipes/qwen2.5-72b-dpo/full-z3-offload-liger-unsloth-gc.v1.yaml").read_text()
    assert out.endswith(yaml_text)


def test_show_json_names_each_variable_with_its_reason(dpofit: Run) -> None:
    _, out, _ = dpofit("show", "full-z3-no-expandable", "--json")
    document = json.loads(out)
    assert document["schema"] == "dpofit.show/1"
    assert document["environment"][0] == {
        "variable": "OPTIM_TORCH",
        "value": "0",
        "why": "else LLaMA-Factory's launcher sets expandable_segments:True over any value given here",
    }


@pytest.mark.parametrize("entry", all_recipes(), ids=lambda entry: f"{entry.file.family}/{entry.file.name}")
def test_every_recipe_can_be_shown_and_copied(entry: CatalogueEntry, dpofit: Run, tmp_path: Path) -> None:
    name = f"{entry.file.family}/{entry.file.name}"
    assert dpofit("show", name)[0] == 0
    assert dpofit("copy", name, tmp_path / "run")[0] == 0
    copied, original = (yaml.safe_load(path.read_text()) for path in (tmp_path / "run/recipe.yaml", entry.file.path))
    if "deepspeed" in original:
        assert copied["deepspeed"] == str(tmp_path / "run/ds.json")
        shipped = (catalogue_root() / original["deepspeed"]).read_bytes()
        assert (tmp_path / "run/ds.json").read_bytes() == shipped
    assert {**copied, "deepspeed": None} == {**original, "deepspeed": None}


def test_copy_works_in_a_folder_with_spaces_colons_and_hashes(dpofit: Run, tmp_path: Path) -> None:
    folder = tmp_path / "my runs: a # b" / "überlang"
    assert dpofit("copy", "lora-z3", folder)[0] == 0
    assert yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))["deepspeed"] == str(folder / "ds.json")


def test_copy_writes_the_environment_with_its_reasons(dpofit: Run, tmp_path: Path) -> None:
    dpofit("copy", "full-z3-offload", tmp_path)
    text = (tmp_path / "dpofit.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {
        "recipe": "qwen2.5-72b-dpo/full-z3-offload.v1",
        "env": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        },
        "long_context": dict.fromkeys(PIECES, False),
    }
    assert "# the newer name of the same setting" in text


def test_copy_says_that_llamafactory_runs_a_long_recipe_without_its_pieces(dpofit: Run, tmp_path: Path) -> None:
    without = "train recipe.yaml  # runs stock, without the long-context pieces\n"
    assert without in dpofit("copy", "qwen2.5-7b-dpo/lora-long", tmp_path / "long")[1]
    assert "train recipe.yaml\n" in dpofit("copy", "lora-ddp", tmp_path / "stock")[1]


def test_copy_json_says_what_was_written_where(dpofit: Run, tmp_path: Path) -> None:
    _, out, _ = dpofit("copy", "lora-ddp", tmp_path / "run", "--json")
    assert json.loads(out) == {
        "schema": "dpofit.copy/1",
        "recipe": "qwen2.5-7b-dpo/lora-ddp.v1",
        "folder": str(tmp_path / "run"),
        "files": ["recipe.yaml", "dpofit.yaml"],
        "environment": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        },
        "long_context": [],
        "output_dir": "saves/qwen2.5-7b-dpo/lora-ddp.v1",
    }


def test_copy_json_names_the_pieces(dpofit: Run, tmp_path: Path) -> None:
    _, out, _ = dpofit("copy", "qwen2.5-7b-dpo/lora-long", tmp_path / "run", "--json")
    assert json.loads(out)["long_context"] == list(PIECES)


def test_show_parts_its_stanzas_by_one_blank_line(dpofit: Run, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model_name_or_path: Qwen/Qwen2.5-7B\nstage: dpo\n\ndataset: x\noutput_dir: o\n")
    for name in ("full-z3-offload", str(own)):
        shown = dpofit("show", name)[1]
        assert "\n\n" in shown and "\n\n\n" not in shown


def test_copy_into_an_empty_name_is_refused_not_spread_over_the_working_directory(
    dpofit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = dpofit("copy", "lora-z3", "")
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "DIR: is empty" in err


def test_copy_refuses_to_overwrite_and_names_each_file(dpofit: Run, tmp_path: Path) -> None:
    for name in ("recipe.yaml", "ds.json"):
        (tmp_path / name).write_text("mine")
    code, _, err = dpofit("copy", "lora-z3", tmp_path)
    assert code == 2
    assert err.splitlines() == [
        f"error: {tmp_path}/recipe.yaml: exists already. Name another folder, or add --force to replace it",
        f"error: {tmp_path}/ds.json: exists already. Name another folder, or add --force to replace it",
    ]
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    assert not (tmp_path / "dpofit.yaml").exists()


def test_copy_with_force_replaces_its_own_files_and_nothing_else(dpofit: Run, tmp_path: Path) -> None:
    for name in ("recipe.yaml", "notes.txt"):
        (tmp_path / name).write_text("mine")
    assert dpofit("copy", "lora-z3", tmp_path, "--force")[0] == 0
    assert (tmp_path / "recipe.yaml").read_text() != "mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_copy_onto_a_file_is_refused(dpofit: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    code, _, err = dpofit("copy", "lora-z3", tmp_path / "taken")
    assert (code, err) == (2, f"error: {tmp_path}/taken: DIR: is a file. Name a folder\n")


def test_copy_into_a_folder_that_cannot_be_made_is_refused(dpofit: Run) -> None:
    code, _, err = dpofit("copy", "lora-z3", "/dev/null/run")
    assert code == 2 and "cannot be written" in err and "Traceback" not in err


@pytest.mark.parametrize("command", [["show", "nope"], ["copy", "nope", "somewhere"]])
def test_a_recipe_the_catalogue_has_not_is_exit_2_in_one_line(
    dpofit: Run, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = dpofit(*command)
    assert (code, out) == (2, "")
    assert err == "error: nope: is neither a file nor a recipe of the catalogue. `dpofit list` shows all.\n"
    assert list(tmp_path.iterdir()) == []


OWN = """\
# mine
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: dpo
do_train: true
deepspeed: examples/deepspeed/ds_z3_config.json  # theirs
dataset: pairs
template: qwen
output_dir: out
bf16: true
"""


def test_ones_own_file_is_copied_with_its_comments_and_its_deepspeed_config(dpofit: Run, tmp_path: Path) -> None:
    (tmp_path / "my dpo.yaml").write_text(OWN)
    folder = tmp_path / "run a"
    assert dpofit("copy", tmp_path / "my dpo.yaml", folder)[0] == 0
    theirs = "deepspeed: examples/deepspeed/ds_z3_config.json  # theirs"
    ours = f'deepspeed: "{folder}/ds.json"'
    assert (folder / "recipe.yaml").read_text() == OWN.replace(theirs, ours)
    assert json.loads((folder / "ds.json").read_text())["zero_optimization"]["stage"] == 3
    assert yaml.safe_load((folder / "dpofit.yaml").read_text())["recipe"] == "my dpo"
    assert dpofit("check", folder)[0] == 0


def test_a_run_folder_is_copied_with_what_its_owner_changed_in_dpofit_yaml(dpofit: Run, tmp_path: Path) -> None:
    dpofit("copy", "lora-z3", tmp_path / "a")
    changed = (tmp_path / "a/dpofit.yaml").read_text().replace("tiled_mlp: false", "tiled_mlp: true")
    (tmp_path / "a/dpofit.yaml").write_text(changed)
    assert dpofit("copy", tmp_path / "a", tmp_path / "b")[0] == 0
    assert (tmp_path / "b/dpofit.yaml").read_text() == changed
    assert yaml.safe_load((tmp_path / "b/recipe.yaml").read_text())["deepspeed"] == str(tmp_path / "b/ds.json")


def test_ones_own_json_becomes_yaml(dpofit: Run, tmp_path: Path) -> None:
    mine = {**yaml.safe_load(OWN), "deepspeed": {"zero_optimization": {"stage": 2}}}
    (tmp_path / "mine.json").write_text(json.dumps(mine))
    assert dpofit("copy", tmp_path / "mine.json", tmp_path / "run")[0] == 0
    assert yaml.safe_load((tmp_path / "run/recipe.yaml").read_text()) == mine
    assert not (tmp_path / "run/ds.json").exists()


def test_ones_own_file_is_shown_as_it_is_understood(dpofit: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    code, out, _ = dpofit("show", tmp_path / "mine.yaml", "--json")
    document = json.loads(out)
    assert (code, document["title"]) == (0, "dpo of Qwen/Qwen2.5-7B-Instruct, lora")
    assert (document["hardware"], document["versions"], document["yaml"]) == (None, [], OWN)
    assert "ds_z3_config.json" in document["notes"]


def test_ones_own_broken_file_is_refused_with_its_problems(dpofit: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("stage: dpo\nbanana: 1\n")
    for command in (["show", tmp_path / "mine.yaml"], ["copy", tmp_path / "mine.yaml", tmp_path / "run"]):
        code, _, err = dpofit(*command)
        assert code == 2 and "banana" in err and "model_name_or_path" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["list", "show", "copy"])
def test_help_has_examples(dpofit: Run, command: str) -> None:
    code, out, _ = dpofit(command, "--help")
    assert code == 0
    assert f"dpofit {command}" in out.partition("Examples:")[2]


@pytest.mark.parametrize("entry", all_recipes(), ids=lambda entry: f"{entry.file.family}/{entry.file.name}")
def test_check_has_nothing_against_any_recipe(entry: CatalogueEntry, dpofit: Run) -> None:
    code, out, _ = dpofit("check", f"{entry.file.family}/{entry.file.name}", "--json")
    document = json.loads(out)
    found = [finding["id"] for finding in document["findings"] if finding["severity"] != "info"]
    # said of any recipe where the repository itself lies in a path with spaces
    assert [kind for kind in found if kind != "config.cli-spaces"] == []
    assert code == 0
