"""`dpofit launch RECIPE --smoke`: one's own recipe with a tiny model, on real torchrun, LLaMA-Factory, DeepSpeed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpofit.errors import BadInput
from dpofit.launch.smoke import _refuse_unbuildable
from dpofit.launch.smoke_plan import smoke_plan
from dpofit.recipe.catalogue import recipe_files
from dpofit.recipe.load import read_recipe
from tests.launch.runs import dpofit, environment, write_run

pytestmark = pytest.mark.stack

# One of each class; LoRA under DDP is the run of one's own YAML below. --all runs every recipe of the catalogue.
CLASSES = {
    "full, ZeRO-3": ("qwen2.5-72b-dpo/full-z3",),
    "offload, unsloth gc, Liger": ("qwen2.5-72b-dpo/full-z3-offload-liger-unsloth-gc",),
    "ZeRO-2": ("qwen2.5-7b-dpo/full-z2",),
    "every long-context piece": ("qwen2.5-72b-dpo/lora-long",),
    "QLoRA, one GPU, no reference": ("qwen2.5-7b-dpo/qlora-1gpu", "pref_loss=orpo"),
}
if os.environ.get("DPOFIT_TEST_ALL"):
    CLASSES |= {file.full_name: (file.full_name,) for file in recipe_files()}
    CLASSES |= {
        "one GPU, no reference": ("qwen2.5-7b-dpo/lora-1gpu", "pref_loss=orpo"),
        "simpo": ("qwen2.5-7b-dpo/lora-ddp", "pref_loss=simpo"),
        "sft": ("qwen2.5-7b-dpo/full-z2", "stage=sft"),
        "kto": ("qwen2.5-7b-dpo/lora-ddp", "stage=kto"),
        "freeze": ("qwen2.5-7b-dpo/full-z3", "finetuning_type=freeze"),
        "evaluation": ("qwen2.5-7b-dpo/full-z3", "val_size=0.2", "eval_strategy=steps"),
    }
# SimPO: −ln σ(−γ), γ 1 in the recipe and 0.5 by default; ln 320 = 5.768321
FIRST_LOSS = {
    "orpo": 5.837634, "z3-simpo": 1.313262, "=simpo": 0.974077, "=sft": 5.768321, "=kto": 0.5,
}  # fmt: skip


UNBUILDABLE = " " in sys.prefix  # the offload class is refused there, as the last test says


def smoke(*arguments: str, cwd: Path, **variables: str) -> dict[str, Any]:
    env = {name: value for name, value in environment(**variables).items() if name != "DPOFIT_CPU_RANKS"}
    done = dpofit("launch", *arguments, "--smoke", "--json", cwd=cwd, env=env, timeout_s=580)
    assert done.stdout, done.stderr
    return {"exit": done.returncode, "said": done.stderr, **json.loads(done.stdout)["smoke"]}


@pytest.mark.parametrize("arguments", CLASSES.values(), ids=CLASSES)
def test_recipe_trains_saves_and_resumes(arguments: tuple[str, ...], tmp_path: Path) -> None:
    if UNBUILDABLE and "offload" in arguments[0]:
        pytest.skip("torch is installed in a path with spaces")
    report = smoke(*arguments, cwd=tmp_path)
    assert [check for check in report["checks"] if check["ok"] is False] == []
    assert (report["exit"], report["ok"], report["outcome"]["cause"]) == (0, True, "finished")
    names = [check["name"] for check in report["checks"]]
    assert "resume ends where the uninterrupted run ended" in names
    assert "final model verifies" in names
    kind = next((kind for kind in FIRST_LOSS if any(kind in argument for argument in arguments)), None)
    seen = next(check["seen"] for check in report["checks"] if check["name"] == "first loss")
    assert float(seen.partition(",")[0]) == pytest.approx(FIRST_LOSS.get(kind or "", 0.693147), rel=2e-3)


@pytest.mark.skipif("DPOFIT_TEST_ALL" not in os.environ, reason="a minute; --all runs it")
def test_a_loss_that_the_stack_does_not_train_is_found_by_its_first_value(tmp_path: Path) -> None:
    report = smoke("qwen2.5-7b-dpo/lora-ddp", "pref_loss=ipo", cwd=tmp_path)
    [failed] = [check for check in report["checks"] if check["ok"] is False]
    assert (failed["name"], failed["seen"][:6], failed["expected"][:7]) == ("first loss", "0.6931", "25.0000")


def test_nothing_outside_its_own_folder_changes(tiny_model: Path, tmp_path: Path) -> None:
    folder, home, temporary = tmp_path / "my run", tmp_path / "home", tmp_path / "tmp"
    recipe = write_run(folder, tiny_model)
    home.mkdir()
    temporary.mkdir()
    before = _tree(folder)
    report = smoke(str(recipe), "max_samples=7", cwd=folder, HOME=str(home), TMPDIR=str(temporary), HF_TOKEN="hf_x")
    assert report["ok"], (report["checks"], report["outcome"])
    seen = {check["name"]: check["seen"] for check in report["checks"]}
    assert seen["resume ends where the uninterrupted run ended"] == "bit for bit"
    assert _tree(folder) == before
    assert list(temporary.iterdir()) == []
    cached = {path.relative_to(home).parts[:2] for path in home.rglob("*") if path.is_file()}
    assert cached <= {(".cache", "dpofit")}
    replaced = {entry["key"] for entry in report["replaced"]}
    assert {"output_dir", "model_name_or_path", "dataset_dir", "max_samples", "max_steps"} <= replaced
    assert not replaced & {"finetuning_type", "lora_rank", "stage", "bf16", "template", "cutoff_len"}


def test_a_recipe_that_cannot_train_fails_with_its_reason(tmp_path: Path) -> None:
    report = smoke("qwen2.5-7b-dpo/lora-1gpu", "lora_target=no_such_layer", cwd=tmp_path)
    assert (report["exit"], report["ok"]) == (1, False)
    assert "no_such_layer" in report["outcome"]["title"]
    assert Path(report["log"]).read_text()
    Path(report["log"]).unlink()


def test_qlora_without_bitsandbytes_is_refused_by_name(tmp_path: Path) -> None:
    read = read_recipe("qwen2.5-7b-dpo/qlora-1gpu")
    assert read.recipe is not None
    with pytest.raises(BadInput, match="quantization_bit: needs bitsandbytes, which is not installed here"):
        smoke_plan(read.recipe, None, tmp_path, gpus=0, bitsandbytes=False)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["finetuning_type=full", "use_badam=true"], "a checkpoint of BAdam holds neither whose turn it is nor"),
        (["save_only_model=true"], "save_only_model keeps no optimizer states"),
        ([], None),
    ],
)
def test_checkpoints_that_no_run_can_go_on_from_are_named(
    arguments: list[str], why: str | None, tmp_path: Path
) -> None:
    read = read_recipe("qwen2.5-7b-dpo/lora-1gpu", arguments)
    assert read.recipe is not None
    no_resume = smoke_plan(read.recipe, None, tmp_path, gpus=0, bitsandbytes=False).no_resume
    assert no_resume is None if why is None else (no_resume or "").startswith(why)


def test_without_the_training_stack_it_says_how_to_get_it(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['torch'] = None; from dpofit.cli.app import main; main()"
    command = [sys.executable, "-c", hidden, "launch", "qwen2.5-7b-dpo/full-z3", "--smoke"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: this environment: torch: not installed. Install the training stack: bash scripts/install.sh VENV, in "
        "dpofit's repository.\n"
    )


def test_offload_is_refused_where_its_optimizer_cannot_be_compiled() -> None:
    recipe = read_recipe("qwen2.5-72b-dpo/full-z3-offload").recipe
    assert recipe is not None
    _refuse_unbuildable(recipe, "/venv/site-packages/torch")
    with pytest.raises(BadInput, match="torch lies in a path with spaces"):
        _refuse_unbuildable(recipe, "/my venv/site-packages/torch")


def _tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
