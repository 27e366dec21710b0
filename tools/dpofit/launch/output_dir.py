"""Keeps a launch from mixing two recipes or two runs in one output_dir, or from overwriting whole checkpoints."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

from dpofit.errors import Problem
from dpofit.launch.state import Running, running
from dpofit.recipe.recipe import Recipe
from dpofit.train.guard.manifest import looks_whole

RECORD = Path("dpofit") / "recipe.json"
# Keys that make weights or optimizer states of one run useless to another.
_IDENTITY = (
    "model_name_or_path", "stage", "finetuning_type", "lora_rank", "lora_target", "additional_target", "use_dora",
    "quantization_bit", "freeze_trainable_layers", "freeze_trainable_modules", "template", "pref_loss",
)  # fmt: skip


def output_dir_problems(recipe: Recipe, output_dir: Path) -> list[Problem]:
    """Why training into `output_dir` would damage what is there; empty when it would not."""
    checkpoints = [
        path for path in sorted(output_dir.glob("checkpoint-*")) if re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    if not checkpoints:
        return []
    where = str(output_dir)
    if recipe.settings.get("overwrite_output_dir"):
        whole = [path.name for path in checkpoints if looks_whole(path)]
        if whole:
            wrong = f"would train over whole checkpoints: {', '.join(whole)}"
            right = "Choose another output_dir, set it to false to resume, or add --force."
            return [Problem(where, "overwrite_output_dir", wrong, right)]
        return []
    right = "Choose another output_dir, or add --force."
    recorded = _recorded(output_dir)
    if recorded is not None:
        ours = identity(recipe)
        other = [
            f"{key} {recorded.get(key)!r}, now {ours[key]!r}" for key in _IDENTITY if recorded.get(key) != ours[key]
        ]
        if other:
            return [Problem(where, "output_dir", f"holds checkpoints of another recipe ({'; '.join(other)})", right)]
        return []
    # Without our record the newest checkpoint still tells adapters from whole models.
    newest = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]))
    adapter = (newest / "adapter_config.json").exists()
    if adapter != (recipe.finetuning in ("lora", "oft")) and any(newest.iterdir()):
        kind = "an adapter" if adapter else "a whole model"
        wrong = f"{newest.name} is {kind}, this recipe trains finetuning_type: {recipe.finetuning}"
        return [Problem(where, "output_dir", wrong, right)]
    return []


def identity(recipe: Recipe) -> dict[str, object]:
    """What makes it this recipe and no other."""
    values = {key: recipe.settings.get(key) for key in _IDENTITY}
    return {**values, "stage": recipe.stage, "finetuning_type": recipe.finetuning, "pref_loss": recipe.pref_loss}


def other_run(output_dir: Path, state: Path) -> Running | None:
    """Who on this host trains into `output_dir` from another run folder than that of `state`."""
    try:
        theirs = Path(_owner_file(output_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return running(theirs) if theirs != state else None


def own(output_dir: Path, state: Path) -> None:
    """Note that the run of `state` trains into `output_dir` now. OSError if it can't be written."""
    path = _owner_file(output_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(state), encoding="utf-8")


def _owner_file(output_dir: Path) -> Path:
    return output_dir / "dpofit" / f"run.{socket.gethostname()}"


def record(recipe: Recipe, output_dir: Path) -> None:
    """Leave the recipe's identity for the next launch. OSError if output_dir can't be written."""
    path = output_dir / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": "dpofit.recipe/1", **identity(recipe)}, indent=1), encoding="utf-8")


def _recorded(output_dir: Path) -> dict | None:
    try:
        document = json.loads((output_dir / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
