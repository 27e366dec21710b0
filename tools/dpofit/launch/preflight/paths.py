"""Findings about files: model, data and output where the recipe says, room for checkpoints, time to tokenize."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dpofit.errors import BadInput
from dpofit.findings import Evidence, Finding
from dpofit.models.known import find_model
from dpofit.recipe.load import ReadRecipe
from dpofit.units import GIB, format_gib

# Text that one process turns into pairs of tokens in a second. Assumed, on the low side, so that only a wait in the
# order of the timeout is reported; the real rate depends on the tokenizer.
TOKENIZED_BYTES_PER_S = 1_000_000
DEFAULT_DDP_TIMEOUT_S = 1800


def path_findings(found: ReadRecipe, folder: Path, checkpoint_bytes: int | None) -> Iterator[Finding]:
    """`folder` is the job's working directory; `checkpoint_bytes` None: unknown."""
    assert found.recipe is not None
    settings = found.settings
    yield from _model(found, folder)
    tokenized = settings["tokenized_path"]
    if not (tokenized and (folder / str(tokenized)).exists()):
        yield from _dataset(found, folder)
    output = folder / str(settings["output_dir"] or "trainer_output")
    place = output
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK) or not place.is_dir():
        yield Finding(
            "launch.output-unwritable", "error", f"output_dir can't be written: {output}",
            (Evidence(settings.where("output_dir"), str(settings["output_dir"])), Evidence(str(place), "not writable")),
            "The first save, or the first line of a log, would fail.", "Choose a folder you can write on every node.",
        )  # fmt: skip
    elif found.recipe.saves:
        yield from _disk(found, place, checkpoint_bytes)


def _model(found: ReadRecipe, folder: Path) -> Iterator[Finding]:
    assert found.recipe is not None
    name = found.recipe.model
    local = name.startswith(("/", ".", "~")) or name.count("/") != 1
    path = folder / Path(name).expanduser()
    if path.is_dir():
        weights = [p for pattern in ("*.safetensors", "*.bin", "*.pt") for p in path.glob(pattern)]
        if not (path / "config.json").is_file() or not weights:
            lacks = "config.json" if not (path / "config.json").is_file() else "weights (*.safetensors)"
            yield Finding(
                "launch.model-missing", "error", f"the model's folder has no {lacks}: {path}",
                (Evidence(found.settings.where("model_name_or_path"), name),),
                "A download that did not finish, or the folder above the snapshot.",
                "Point model_name_or_path at the folder with config.json and all shards.",
            )  # fmt: skip
    elif local:
        yield Finding(
            "launch.model-missing", "error", f"there is no model at {path}",
            (Evidence(found.settings.where("model_name_or_path"), name),),
            "transformers would take it for a name on the hub and fail.",
            "Write the path as this node sees it; on several nodes it must exist on each.",
        )  # fmt: skip
    elif not _cached(name):
        try:
            size = f"about {2 * find_model(name).parameters / 1e9:,.0f} GB"
        except BadInput:
            size = "all of it"
        yield Finding(
            "launch.model-not-local", "info", f"{name} is not in the local hub cache: every node downloads {size}",
            (Evidence("HF_HUB_CACHE", str(_hub_cache())),), "",
            f"hf download {name}, once on each node or shared disk.",
        )  # fmt: skip


def _dataset(found: ReadRecipe, folder: Path) -> Iterator[Finding]:
    settings = found.settings
    names = [*settings.names("dataset"), *settings.names("eval_dataset")]
    if not names:
        return
    asked = str(settings["dataset_dir"])
    info_path = folder / asked / "dataset_info.json"
    where = settings.where("dataset_dir" if "dataset_dir" in settings else "dataset")
    if asked == "ONLINE" or asked.startswith("REMOTE:"):
        return
    try:
        info = json.loads(info_path.read_text(encoding="utf-8"))
    except OSError as error:
        yield Finding(
            "launch.dataset-missing", "error", f"{info_path} can't be read ({error.strerror})",
            (Evidence(where, asked),),
            "LLaMA-Factory looks datasets up there, relative to where training is started.",
            "Set dataset_dir to the folder that holds dataset_info.json, as an absolute path.",
        )  # fmt: skip
        return
    except ValueError as error:
        yield Finding(
            "launch.dataset-missing", "error", f"{info_path} is not JSON ({error})", (Evidence(where, asked),)
        )
        return
    text_bytes = 0
    for name in names:
        entry = info.get(name)
        if entry is None:
            yield Finding(
                "launch.dataset-missing", "error", f"dataset {name} is not defined in {info_path}",
                (Evidence(settings.where("dataset"), name),
                 Evidence(str(info_path), f"defined: {', '.join(list(info)[:8])}{', …' * (len(info) > 8)}")),
                "Undefined datasets end the run after the tokenizer is loaded.", "Correct the name, or add an entry.",
            )  # fmt: skip
        elif file_name := entry.get("file_name"):
            path = folder / asked / str(file_name)
            if not path.exists():
                yield Finding(
                    "launch.dataset-missing", "error", f"the file of dataset {name} does not exist: {path}",
                    (Evidence(str(info_path), json.dumps({"file_name": file_name})),),
                    "", "Put it there, or correct file_name.",
                )  # fmt: skip
            else:
                text_bytes += _size(path)
    yield from _tokenizing(found, text_bytes)


def _tokenizing(found: ReadRecipe, text_bytes: int) -> Iterator[Finding]:
    settings = found.settings
    workers = max(1, int(settings["preprocessing_num_workers"] or 1))
    timeout_s = float(settings["ddp_timeout"] or DEFAULT_DDP_TIMEOUT_S)
    seconds = text_bytes / (TOKENIZED_BYTES_PER_S * workers)
    if seconds > timeout_s / 2:
        yield Finding(
            "launch.tokenizing-outlasts-timeout", "warning",
            f"tokenizing may take {seconds / 60:,.0f} min, other ranks wait at most {timeout_s / 60:,.0f} min",
            (Evidence("data", f"{format_gib(text_bytes)} of text, {workers} process{'es' * (workers > 1)}, assumed "
                      f"{TOKENIZED_BYTES_PER_S / 1e6:g} MB a second each"),
             Evidence(settings.where("ddp_timeout"), f"ddp_timeout {timeout_s:g} s")),
            "Rank 0 tokenizes while the others wait in a collective: \"Watchdog caught collective operation timeout\".",
            "Tokenize once ahead (tokenized_path), raise preprocessing_num_workers, or raise ddp_timeout.",
        )  # fmt: skip


def _disk(found: ReadRecipe, place: Path, checkpoint_bytes: int | None) -> Iterator[Finding]:
    assert found.recipe is not None
    free = shutil.disk_usage(place).free
    if checkpoint_bytes is None:
        if free < GIB:
            yield Finding(
                "launch.disk-small", "error", f"less than 1 GiB is free at {place}",
                (Evidence(str(place), f"{format_gib(free)} free"),),
                "No checkpoint fits.", "Free space, or choose another output_dir.",
            )  # fmt: skip
        return
    # One more than the limit exists while a new one is written, and the final model beside them.
    kept = (found.recipe.save_total_limit or 1) + 1
    needed = checkpoint_bytes * kept
    if free < needed:
        one = free < checkpoint_bytes
        yield Finding(
            "launch.disk-small", "error" if one else "warning",
            f"{format_gib(free)} are free for checkpoints of {format_gib(checkpoint_bytes)}",
            (Evidence(str(place), f"{format_gib(free)} free"),
             Evidence("save_total_limit", f"{found.recipe.save_total_limit}, and one more while saving: {kept}")),
            "Not one checkpoint fits." if one else "The disk fills up before old checkpoints are rotated away.",
            "Free space, choose another output_dir, lower save_total_limit, or save_only_model.",
        )  # fmt: skip


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", home / "hub")))


def _cached(name: str) -> bool:
    return any((_hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
