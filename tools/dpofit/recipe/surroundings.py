"""What `check` says of a recipe's surroundings: environment, command line, card, and this machine's disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpofit.hardware.cluster import Gpu
from dpofit.recipe.card_limits import unable
from dpofit.recipe.environment import ALLOCATOR_VARIABLES, launcher_sets_allocator
from dpofit.recipe.issue import Issue
from dpofit.recipe.keys import nearest
from dpofit.recipe.load import ReadRecipe
from dpofit.recipe.long_context import written
from dpofit.recipe.run import Run
from dpofit.recipe.settings import Settings

# llamafactory 0.9.5 extras/constants.py CHECKPOINT_NAMES
_FINISHED_MODEL = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)


def launch_advice(read: ReadRecipe, gpu: Gpu | None) -> Iterator[Issue]:
    """Remarks on the environment, the command line and the card."""
    s, path = read.settings, read.settings.document.path
    for name in ALLOCATOR_VARIABLES:
        value = read.environment.get(name, "")
        if value and value != "expandable_segments:True" and launcher_sets_allocator(read.environment):
            right = "Set OPTIM_TORCH=0, or launch with dpofit."
            yield Issue("config.expandable-overwritten", "environment", name, f"is {value}", right)
            break
    if path.suffix.lower() == ".json":
        yield Issue("config.cli-json", str(path), None, "is a JSON recipe", "Run it with dpofit, or save it as YAML.")
    if any(character.isspace() for character in str(path)):
        right = "Run it with dpofit, or rename it."
        yield Issue("config.cli-spaces", str(path), None, "has a space in its path", right)
    if read.run.long_context:
        wrong = f"has long-context pieces: {written(read.run.long_context)}"
        yield Issue("config.long-context-stock", str(path), None, wrong, "Start it with `dpofit launch`.")
    if gpu is not None:
        yield from card_advice(s, gpu.name, gpu.compute_capability)
    found = read.deepspeed
    if found is not None and found.found_in in ("recipe folder", "example"):
        wrong = f"was found in the recipe's folder: {found.source}"
        if found.found_in == "example":
            wrong = f"is not here; {Path(found.source).name} is taken for LLaMA-Factory's example of that name"
        yield s.issue("config.deepspeed-location", "deepspeed", wrong, "Start from the folder it is relative to.")


def card_advice(s: Settings, card: str, compute_capability: tuple[int, int] | None) -> Iterator[Issue]:
    """What the card can't do."""
    asked = unable(
        card, compute_capability, bf16=s.on("bf16"), pure_bf16=s.on("pure_bf16"), attention=str(s["flash_attn"])
    )
    return (s.issue(found.id, found.key, found.wrong, f"{found.right}.") for found in asked)


def disk_advice(run: Run) -> Iterator[Issue]:
    """What this machine's disk says: output folder, local paths, dataset_info.json."""
    yield from _output_folder(run)
    s = run.settings
    for key in ("model_name_or_path", "adapter_name_or_path", "ref_model", "ref_model_adapters", "media_dir"):
        for name in s.names(key):
            if re.match(r"[/~]|\.\.?/", name) and not os.path.exists(os.path.expanduser(name)):
                right = "Correct it, unless the run happens on another machine."
                yield s.issue("config.files-missing", key, f"names {name}, which is not here", right)
    yield from _datasets(run)


def _output_folder(run: Run) -> Iterator[Issue]:
    """hparams/parser.py 476-505: what LLaMA-Factory does about a folder that is not empty."""
    s = run.settings
    folder = Path(str(s["output_dir"] or "trainer_output")).expanduser()
    if not os.path.isdir(folder) or not s.on("do_train"):
        return
    names = os.listdir(folder)
    steps = [int(name[11:]) for name in names if re.fullmatch(r"checkpoint-\d+", name) and (folder / name).is_dir()]
    starts_over = run.stage in ("rm", "ppo") and run.method in ("full", "freeze")
    if steps and s.on("overwrite_output_dir"):
        yield s.issue("config.overwrite-output", "output_dir", f"holds {len(steps)} checkpoints", "Name a new folder.")
    elif s.set("resume_from_checkpoint") or s.on("overwrite_output_dir") or starts_over:
        return
    elif steps:
        wrong = f"holds checkpoint-{max(steps)}, and resumes from it"
        yield s.issue("config.output-has-checkpoints", "output_dir", wrong, "Name a new folder to start over.")
    elif any(name in _FINISHED_MODEL for name in names):
        right = "Name a new folder, or set overwrite_output_dir: true."
        yield s.issue("config.output-not-empty", "output_dir", "holds a finished model", right)


def _datasets(run: Run) -> Iterator[Issue]:
    """data/parser.py get_dataset_list and data/loader.py 178: names must be known and ranked as the stage needs."""
    s = run.settings
    info = _dataset_info(s["dataset_dir"])
    if info is None:
        return
    ranked = run.stage in ("dpo", "rm")
    for key in ("dataset", "eval_dataset"):
        for name in s.names(key):
            entry = info.get(name)
            if entry is None:
                close = nearest(name, list(info))
                right = f"Did you mean {close}?" if close else "Add it to dataset_info.json."
                yield s.issue("config.dataset-unknown", key, f"names {name}, which dataset_info.json has not", right)
            elif isinstance(entry, dict) and bool(entry.get("ranking")) is not ranked:
                wrong = f"names {name}, which is {'not ' if ranked else ''}a ranking dataset"
                right = 'Add "ranking": true to its entry.' if ranked else "Choose a dataset without ranking."
                yield s.issue("config.dataset-not-ranked", key, f"{wrong}, in stage {run.stage}", right)


def _dataset_info(dataset_dir: Any) -> dict[str, Any] | None:
    """The datasets LLaMA-Factory would know, or None when their list is not at hand."""
    if isinstance(dataset_dir, dict):
        return dataset_dir
    path = Path(str(dataset_dir)).expanduser() / "dataset_info.json"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) else None
