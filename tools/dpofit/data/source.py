"""From the command's argument, a data file, a data set's name or a recipe, to the data sets and settings to check."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpofit.data.loading import Row
from dpofit.data.spec import DATASET_INFO, Dataset, declaration_of, declared_datasets, file_problems, files_of
from dpofit.data.suggest import CANONICAL, suggest
from dpofit.data.templates import Thinking
from dpofit.errors import BadInput, Problem
from dpofit.recipe.catalogue import find_recipe
from dpofit.recipe.keys import known_keys
from dpofit.recipe.load import read_recipe
from dpofit.recipe.overrides import parse_overrides

# The keys of a recipe that decide what training makes of the data.
KEYS = (
    *("stage", "dataset", "dataset_dir", "eval_dataset", "val_size", "template", "cutoff_len", "model_name_or_path"),
    *("default_system", "enable_thinking", "preserve_thinking"),
)
RANKED_STAGES = ("dpo", "rm")
PEEK_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What of a recipe decides how its data is read; LLaMA-Factory's defaults where nothing was said."""

    template: str | None = None
    cutoff_len: int | None = None  # None when only a file was given: nothing is cut
    model_folder: Path | None = None
    val_size: float = 0.0
    thinking: Thinking = field(default_factory=Thinking)
    default_system: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """What to check: training sets, evaluation sets, settings, and where they came from."""

    name: str
    datasets: tuple[Dataset, ...]
    eval_datasets: tuple[Dataset, ...]
    settings: Settings


def find_source(target: str, overrides: Sequence[str], peek: Any) -> Source:
    """`target` is a data file, a folder of them, a name in dataset_dir's dataset_info.json, or a RECIPE.

    `peek(path)` gives the first rows of a file, to guess a format that nothing declares. Raises BadInput.
    """
    path = Path(target).expanduser()
    if _is_data(path):
        said = _data_overrides(overrides)
        return _with_evaluation(path.name, (_dataset_of(path, peek),), said)
    if not path.exists() and find_recipe(target) is None and path.suffix not in (".yaml", ".yml", ".json"):
        said = _data_overrides(overrides)
        directory = Path(said["dataset_dir"])
        if (directory / DATASET_INFO).is_file():
            return _with_evaluation(target, tuple(declared_datasets((target,), directory)), said)
        right = "Give a data file, a recipe, or a name in the dataset_info.json of dataset_dir=DIR"
        raise BadInput(Problem(target, None, "is no file, no recipe and no data set here", right))
    return _of_recipe(target, overrides)


def _of_recipe(target: str, overrides: Sequence[str]) -> Source:
    read = read_recipe(target, overrides)
    wrong = [issue.problem() for issue in read.issues if issue.stops and issue.key in KEYS]
    if wrong:
        raise BadInput(wrong)
    settings = read.settings
    if settings["stage"] not in RANKED_STAGES:
        right = f"dpofit data checks preference pairs: stage {' or '.join(RANKED_STAGES)}"
        raise BadInput(Problem(settings.where("stage"), "stage", f"is {settings['stage']}", right))
    names = settings.names("dataset")
    if not names:
        raise BadInput(
            Problem(settings.where("dataset"), "dataset", "is not set", "Name the data set, or give its file")
        )
    directory = Path(str(settings["dataset_dir"])).expanduser()
    return Source(
        target,
        tuple(declared_datasets(names, directory)),
        tuple(declared_datasets(settings.names("eval_dataset"), directory)) if settings["eval_dataset"] else (),
        _settings({key: settings[key] for key in KEYS}),
    )


def _data_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    said = parse_overrides(overrides)
    unknown = [key for key in said if key not in KEYS]
    if unknown:
        right = f"With data one may set: {', '.join(KEYS)}"
        raise BadInput([Problem("command line", key, "says nothing about data", right) for key in unknown])
    defaults: dict[str, Any] = {key: known_keys()[key].default for key in KEYS if key not in ("cutoff_len", "stage")}
    return {**defaults, "cutoff_len": None, **said}


def _with_evaluation(name: str, datasets: tuple[Dataset, ...], said: dict[str, Any]) -> Source:
    names = tuple(part.strip() for part in str(said["eval_dataset"]).split(",")) if said["eval_dataset"] else ()
    directory = Path(said["dataset_dir"])
    evaluation = tuple(declared_datasets(names, directory)) if names else ()
    return Source(name, datasets, evaluation, _settings(said))


def _settings(values: dict[str, Any]) -> Settings:
    problems = []
    cutoff = values["cutoff_len"]
    if cutoff is not None and (not isinstance(cutoff, int) or isinstance(cutoff, bool) or cutoff < 1):
        problems.append(Problem("command line", "cutoff_len", f"is {cutoff!r}", "Give a number of tokens"))
    val_size = values["val_size"] or 0.0
    if not isinstance(val_size, int | float):
        problems.append(Problem("command line", "val_size", f"is {val_size!r}", "Give a share or a number of rows"))
    if problems:
        raise BadInput(problems)
    return Settings(
        template=values["template"],
        cutoff_len=cutoff,
        model_folder=_model_folder(values["model_name_or_path"]),
        val_size=float(val_size),
        thinking=Thinking(values["enable_thinking"], bool(values["preserve_thinking"])),
        default_system=values["default_system"],
    )


def _model_folder(model: str | None) -> Path | None:
    """A local folder, or the model's newest snapshot in the Hugging Face cache of this machine."""
    if not model:
        return None
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cached = home / "hub" / f"models--{model.replace('/', '--')}"
    try:
        snapshot = cached / "snapshots" / (cached / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None


def _is_data(path: Path) -> bool:
    if path.is_dir():
        return not (path / "recipe.yaml").is_file()
    if not path.is_file() or path.suffix in (".yaml", ".yml"):
        return False
    return path.suffix != ".json" or not _is_json_recipe(path)


def _is_json_recipe(path: Path) -> bool:
    """A small JSON object whose keys are those of a recipe."""
    if path.stat().st_size > 1 << 20:
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool({"stage", "model_name_or_path", "dataset"} & content.keys())


def _dataset_of(path: Path, peek: Any) -> Dataset:
    files = files_of(path) if path.is_dir() else (path,)
    if path.is_dir() and (path / DATASET_INFO).is_file():
        right = f"Name one of its data sets: dpofit data NAME dataset_dir={path}"
        raise BadInput(Problem(str(path), None, "is a dataset_dir", right))
    if path.name == DATASET_INFO:
        right = f"Name one of its data sets: dpofit data NAME dataset_dir={path.parent}"
        raise BadInput(Problem(str(path), None, "lists data sets and is none itself", right))
    if problems := file_problems(files, path):
        raise BadInput(problems)
    declared = declaration_of(path) if path.is_file() else None
    if declared is not None:
        return declared
    rows: list[Row] = peek(files[0])
    found = suggest(rows)
    spec = found.spec if found is not None and not found.rewrites else CANONICAL
    return Dataset(path.stem, files, spec, declared_in=None)
