"""A dataset_info.json entry, read as LLaMA-Factory 0.9.5 reads it: which file, which format, which columns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem

# llamafactory 0.9.5 extras/constants.py 41-48 FILEEXT2TYPE
FILE_TYPES = {"arrow": "arrow", "csv": "csv", "json": "json", "jsonl": "json", "parquet": "parquet", "txt": "text"}
FORMATTINGS = ("alpaca", "sharegpt", "openai")
HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
DATASET_INFO = "dataset_info.json"
COLUMN_KEYS = (
    *("prompt", "query", "response", "history", "messages", "system", "tools"),
    *("images", "videos", "audios", "chosen", "rejected", "kto_tag"),
)
TAG_KEYS = (
    *("role_tag", "content_tag"),
    *("user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag"),
)


@dataclass(frozen=True, slots=True)
class Spec:
    """Field for field llamafactory 0.9.5 data/parser.py 27-64 DatasetAttr; None means the column is not used."""

    formatting: str = "alpaca"
    ranking: Any = False
    system: str | None = None
    tools: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    kto_tag: str | None = None
    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    messages: str | None = "conversations"
    role_tag: str | None = "from"
    content_tag: str | None = "value"
    user_tag: str | None = "human"
    assistant_tag: str | None = "gpt"
    observation_tag: str | None = "observation"
    function_tag: str | None = "function_call"
    system_tag: str | None = "system"

    def columns_used(self) -> tuple[str, ...]:
        """Names of the row keys that the converter looks up, in its order; a missing one is a KeyError there."""
        common = (self.system, self.tools, self.images, self.videos, self.audios)
        pair = (self.chosen, self.rejected) if self.ranking else ()
        if self.formatting == "alpaca":
            own: tuple[str | None, ...] = (self.history, self.prompt, self.query)
        else:
            own = (self.messages,)
        return tuple(dict.fromkeys(name for name in (*own, *pair, *common) if name))

    def entry(self, file_name: str) -> dict[str, Any]:
        """The dataset_info.json entry that LLaMA-Factory reads back as this spec."""
        default = Spec()
        used = [key for key in COLUMN_KEYS if getattr(self, key)]
        if self.formatting == "alpaca":
            used = [key for key in used if key not in ("messages", "response")]
        else:
            used = [key for key in used if key not in ("prompt", "query", "response", "history")]
        entry: dict[str, Any] = {"file_name": file_name, "formatting": self.formatting, "ranking": True}
        entry["columns"] = {key: getattr(self, key) for key in used}
        tags = {key: getattr(self, key) for key in TAG_KEYS}
        if self.formatting != "alpaca" and tags != {key: getattr(default, key) for key in TAG_KEYS}:
            entry["tags"] = {key: tag for key, tag in tags.items() if tag is not None}
        return entry


@dataclass(frozen=True, slots=True)
class Dataset:
    """One dataset: its files, how to read them, and where that was said."""

    name: str
    files: tuple[Path, ...]
    spec: Spec
    declared_in: Path | None  # the dataset_info.json; None when the file was given alone and the spec is a guess
    rewrites: bool = False  # rows are first put into sharegpt form by suggest.canonical (only --fix does this)
    unknown_keys: tuple[str, ...] = ()  # keys of `columns` and `tags` that LLaMA-Factory ignores


def spec_of(entry: Mapping[str, Any]) -> Spec:
    """llamafactory 0.9.5 data/parser.py 69-92 DatasetAttr.join: naming `columns` (or `tags`) unsets every other one."""
    spec = replace(Spec(), formatting=entry.get("formatting", "alpaca"), ranking=entry.get("ranking", False))
    for group, keys in (("columns", COLUMN_KEYS), ("tags", TAG_KEYS)):
        if group in entry:
            spec = replace(spec, **{key: entry[group].get(key) for key in keys})
    return spec


def declared_datasets(names: tuple[str, ...], dataset_dir: Path) -> list[Dataset]:
    """The datasets a recipe names. Raises BadInput with every problem in the names and their entries."""
    info_path = dataset_dir / DATASET_INFO
    info = read_info(info_path)
    problems: list[Problem] = []
    datasets: list[Dataset] = []
    for name in names:
        if name not in info:
            known = ", ".join(sorted(info)) or "none"
            problems.append(Problem(str(info_path), name, "this dataset is not defined", f"Defined: {known}"))
            continue
        wrong = _entry_problems(info_path, name, info[name])
        problems += wrong
        if not wrong:
            entry = info[name]
            files, missing = _files(dataset_dir, str(entry["file_name"]), f"{info_path}", name)
            problems += missing
            datasets.append(Dataset(name, files, spec_of(entry), info_path, unknown_keys=unknown_keys(entry)))
    if problems:
        raise BadInput(problems)
    return datasets


def read_info(path: Path) -> dict[str, Any]:
    """dataset_info.json as a mapping of name to entry. Raises BadInput."""
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        right = "Set dataset_dir to the folder that has it, or give the data file itself"
        raise BadInput(Problem(str(path), None, "there is no such file", right)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(Problem(str(path), None, f"cannot be read: {error}", "It must be a JSON object")) from None
    if not isinstance(info, dict):
        raise BadInput(Problem(str(path), None, "is not a JSON object", 'Write {"NAME": {"file_name": …}}'))
    return info


def declaration_of(file: Path) -> Dataset | None:
    """The entry beside this file that names it, if its folder has a dataset_info.json with one."""
    info_path = file.parent / DATASET_INFO
    if not info_path.is_file():
        return None
    for name, entry in read_info(info_path).items():
        if (
            isinstance(entry, dict)
            and entry.get("file_name") == file.name
            and not _entry_problems(info_path, name, entry)
        ):
            return Dataset(name, (file,), spec_of(entry), info_path, unknown_keys=unknown_keys(entry))
    return None


def unknown_keys(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of `columns` and `tags` that LLaMA-Factory never looks up, as `columns.question`."""
    groups = (("columns", COLUMN_KEYS), ("tags", TAG_KEYS))
    return tuple(f"{group}.{key}" for group, known in groups for key in entry.get(group, {}) if key not in known)


def _entry_problems(info_path: Path, name: str, entry: Any) -> list[Problem]:
    where = str(info_path)
    if not isinstance(entry, dict):
        return [Problem(where, name, "is not an object", 'Write {"file_name": "pairs.json", "ranking": true, …}')]
    problems = []
    hub = next((key for key in HUBS if key in entry), None)
    if hub:
        right = "Download it and name the file with file_name; dpofit data reads local files only"
        problems.append(Problem(where, f"{name}.{hub}", "points outside this machine", right))
    elif not isinstance(entry.get("file_name"), str):
        problems.append(
            Problem(where, f"{name}.file_name", "is missing", "Name the data file, relative to dataset_dir")
        )
    if entry.get("formatting", "alpaca") not in FORMATTINGS:
        right = f"One of: {', '.join(FORMATTINGS)}"
        problems.append(Problem(where, f"{name}.formatting", f"unknown format {entry['formatting']!r}", right))
    for group, keys in (("columns", COLUMN_KEYS), ("tags", TAG_KEYS)):
        members = entry.get(group, {})
        if not isinstance(members, dict):
            problems.append(Problem(where, f"{name}.{group}", "is not an object", f"Its keys: {', '.join(keys)}"))
            continue
        for key, value in members.items():
            if key in keys and value is not None and not isinstance(value, str):
                problems.append(Problem(where, f"{name}.{group}.{key}", f"is {value!r}", "Give a column or tag name"))
    return problems


def _files(dataset_dir: Path, file_name: str, where: str, name: str) -> tuple[tuple[Path, ...], list[Problem]]:
    """llamafactory 0.9.5 data/loader.py 73-89: a file, or every entry of a folder, all of one known type."""
    path = dataset_dir / file_name
    if path.is_dir():
        files = files_of(path)
    elif path.is_file():
        files = (path,)
    else:
        return (), [Problem(where, f"{name}.file_name", f"{path} does not exist", "Name a file in dataset_dir")]
    problems = file_problems(files, path)
    return files, problems


def files_of(folder: Path) -> tuple[Path, ...]:
    """In the order of os.listdir, as LLaMA-Factory takes them: the first decides the types of all columns."""
    return tuple(folder / name for name in os.listdir(folder))


def file_problems(files: tuple[Path, ...], where: Path) -> list[Problem]:
    """What LLaMA-Factory's own check of file extensions would refuse."""
    if not files:
        return [Problem(str(where), None, "the folder is empty", "Put the data files there")]
    kinds = {FILE_TYPES.get(file.suffix[1:]) for file in files}
    if None in kinds:
        names = ", ".join(file.name for file in files if FILE_TYPES.get(file.suffix[1:]) is None)
        right = f"LLaMA-Factory takes {', '.join(FILE_TYPES)}; move other files out or unpack them"
        return [Problem(str(where), None, f"unknown file type: {names}", right)]
    if len(kinds) > 1:
        wrong = f"mixes file types: {', '.join(sorted(str(kind) for kind in kinds))}"
        return [Problem(str(where), None, wrong, "LLaMA-Factory wants one type per folder")]
    return []
