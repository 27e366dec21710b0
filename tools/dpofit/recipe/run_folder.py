"""A run folder's files: recipe.yaml (pure LLaMA-Factory), dpofit.yaml (what that can't say), ds.json."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import yaml

from dpofit.recipe.catalogue import CatalogueFile, catalogue_file, catalogue_root
from dpofit.recipe.load import ReadRecipe, recipe_name
from dpofit.recipe.long_context import PIECES, RUN_FILE, RUN_KEY

_DEEPSPEED = re.compile(r"^(deepspeed: )(\S+)", re.MULTILINE)
_DEEPSPEED_LINE = re.compile(r"^deepspeed:[ \t]*[^ \t\n{#].*$", re.MULTILINE)  # a name, whole line


def run_folder_files(read: ReadRecipe, path: Path, folder: Path) -> dict[str, str]:
    """File name → text of the run folder that `dpofit copy` writes; `folder` is absolute, `path` the recipe's file."""
    file = catalogue_file(path)
    return _of_catalogue(file, folder) if file is not None else _of_ones_own(read, path, folder)


def _of_catalogue(file: CatalogueFile, folder: Path) -> dict[str, str]:
    """The recipe keeps its comments; only `deepspeed:` changes, to the folder's own ds.json."""
    recipe = file.path.read_text(encoding="utf-8")
    files = {"recipe.yaml": recipe, RUN_FILE: _dpofit_yaml(file.full_name, file)}
    if match := _DEEPSPEED.search(recipe):
        # A JSON string is a YAML string: quotes keep spaces, colons and hashes of the path as they are.
        target = json.dumps(str(folder / "ds.json"), ensure_ascii=False)
        files["recipe.yaml"] = recipe[: match.start(2)] + target + recipe[match.end(2) :]
        files["ds.json"] = (catalogue_root() / match[2]).read_text(encoding="utf-8")
    return files


def _of_ones_own(read: ReadRecipe, path: Path, folder: Path) -> dict[str, str]:
    """A file from elsewhere: its comments stay too, JSON becomes YAML, and the dpofit.yaml of a run folder comes
    along."""
    recipe = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        recipe = yaml.safe_dump(json.loads(recipe), sort_keys=False, allow_unicode=True)
    beside = path.with_name(RUN_FILE)
    files = {"recipe.yaml": recipe, RUN_FILE: _dpofit_yaml(recipe_name(path))}
    if path.name == "recipe.yaml" and beside.is_file():
        files[RUN_FILE] = beside.read_text(encoding="utf-8")
    if read.deepspeed is not None and not isinstance(read.settings["deepspeed"], Mapping):
        line = f"deepspeed: {json.dumps(str(folder / 'ds.json'), ensure_ascii=False)}"
        files["recipe.yaml"] = _DEEPSPEED_LINE.sub(lambda _: line, recipe)
        files["ds.json"] = json.dumps(dict(read.deepspeed.config), indent=2) + "\n"
    return files


def _dpofit_yaml(name: str, file: CatalogueFile | None = None) -> str:
    from dpofit.recipe.cards import card_of, environment_of, piece_reasons, pieces_of, read_presets

    card = card_of(file.path) if file is not None else None
    presets = read_presets()
    lines = [
        "# dpofit's side of this run: what recipe.yaml, which stays pure LLaMA-Factory, can't say.",
        f"recipe: {json.dumps(name, ensure_ascii=False) if card is None else name}",
        "env:" if card is not None else "env: {}",
    ]
    for variable_name, variable in (environment_of(card, presets) if card is not None else {}).items():
        lines += [f"  # {variable.why}", f"  {variable_name}: {json.dumps(variable.value)}"]
    lines += ["# For `dpofit launch`: the same training, computed otherwise. Plain llamafactory-cli runs stock."]
    lines += [f"{RUN_KEY}:"]
    on = pieces_of(card, presets) if card is not None else frozenset()
    reasons = piece_reasons(presets)
    for piece in PIECES:
        lines += textwrap.wrap(reasons[piece], 116, initial_indent="  # ", subsequent_indent="  # ")
        lines += [f"  {piece}: {json.dumps(piece in on)}"]
    return "\n".join(lines) + "\n"
