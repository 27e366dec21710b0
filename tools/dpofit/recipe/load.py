"""A recipe, by name or path, read and checked whole: `load_recipe` for planning, `read_recipe` for `check`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.recipe.build import build_recipe
from dpofit.recipe.catalogue import catalogue_file, find_recipe, newest, recipe_files
from dpofit.recipe.deepspeed import DeepSpeedConfig, find_deepspeed
from dpofit.recipe.environment import extra_keys_allowed, run_environment
from dpofit.recipe.interpolation import InterpolationError, has_interpolation, resolve
from dpofit.recipe.issue import Issue
from dpofit.recipe.keys import known_keys, nearest
from dpofit.recipe.long_context import long_context_issues, long_context_pieces
from dpofit.recipe.mismatch import deepspeed_mismatches
from dpofit.recipe.notes import Note, notes
from dpofit.recipe.overrides import merge, parse_overrides
from dpofit.recipe.recipe import Recipe, ZeroConfig
from dpofit.recipe.rules import refusals
from dpofit.recipe.run import Run
from dpofit.recipe.settings import Settings, value_issues
from dpofit.recipe.yaml_file import Document, read_document
from dpofit.recipe.zero import zero_config


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe that LLaMA-Factory would run, and remarks on how it was understood."""

    recipe: Recipe
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class ReadRecipe:
    """Everything read, nothing refused: `recipe` is None when an issue stops the run."""

    recipe: Recipe | None
    settings: Settings
    run: Run
    deepspeed: DeepSpeedConfig | None
    environment: Mapping[str, str]
    issues: tuple[Issue, ...]


def load_recipe(
    reference: str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> LoadedRecipe:
    """`reference` is a catalogue name, a YAML or JSON file, or a run folder; `overrides` are `key=value` arguments.

    `environment` is the process environment unless given. BadInput lists every problem with file, line and remedy.
    """
    read = read_recipe(reference, overrides, environment)
    if read.recipe is None:
        raise BadInput([issue.problem() for issue in read.issues if issue.stops])
    return LoadedRecipe(read.recipe, notes(read.recipe, read.settings, read.deepspeed, read.issues))


def read_recipe(
    reference: str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> ReadRecipe:
    """Like load_recipe, but problems come back as issues. BadInput only when there is no file or no syntax."""
    process = os.environ if environment is None else environment
    path = resolve_reference(reference)
    document = read_document(path)
    said = parse_overrides(overrides)
    given = merge(document.values, said)
    given, issues = _interpolated(given, document, said, process)
    settings = Settings(given, document, overridden=said)
    allowed = extra_keys_allowed(process)
    issues += value_issues(settings, allowed)
    if allowed:
        settings = Settings({key: given[key] for key in given if key in known_keys()}, document, overridden=said)
    run_variables, environment_issues = run_environment(path, process)
    issues += environment_issues
    pieces, piece_issues = long_context_pieces(path, process)
    issues += piece_issues

    values_ok = not any(issue.stops and issue.id != "config.unknown-key" for issue in issues)
    found, deepspeed_issues = (None, []) if _unusable(issues, "deepspeed") else find_deepspeed(settings)
    issues += deepspeed_issues
    zero: ZeroConfig | None = None
    unmodelled: tuple[str, ...] = ()
    if found is not None:
        zero, unmodelled, zero_issues = zero_config(found)
        issues += zero_issues
    run = Run(settings, zero, pieces)
    if values_ok:  # rules compare values, which must have the right types first
        issues += [*refusals(run), *long_context_issues(run)]
        if found is not None:
            issues += deepspeed_mismatches(found, settings)
    recipe = None
    if not any(issue.stops for issue in issues):
        recipe = build_recipe(settings, recipe_name(path), zero, run_variables, unmodelled, pieces)
    return ReadRecipe(recipe, settings, run, found, run_variables, tuple(issues))


def resolve_reference(reference: str) -> Path:
    """The file a RECIPE argument means. BadInput names the nearest catalogue entries."""
    path = Path(reference).expanduser()
    if os.path.isfile(path):  # unlike Path.is_file, false for names no file system takes and folders one may not read
        return path
    if os.path.isfile(path / "recipe.yaml"):
        return path / "recipe.yaml"
    if (found := find_recipe(reference)) is not None:
        return found
    files = newest(recipe_files())
    names = list(dict.fromkeys([file.name for file in files] + [f"{file.family}/{file.name}" for file in files]))
    close = nearest(reference, names)
    if os.path.isdir(path):
        raise BadInput(
            Problem(
                reference,
                None,
                "is a folder without recipe.yaml",
                "Give a recipe file, or a folder made by `dpofit copy`.",
            )
        )
    meant = f"Did you mean {close}? " if close else ""
    raise BadInput(
        Problem(reference, None, "is neither a file nor a recipe of the catalogue", f"{meant}`dpofit list` shows all.")
    )


def recipe_name(path: Path) -> str:
    """`family/name.vN` in the catalogue, else the file's stem (its folder's name for a run folder's recipe.yaml)."""
    if (file := catalogue_file(path)) is not None:
        return file.full_name
    return path.resolve().parent.name if path.name == "recipe.yaml" else path.stem


def _interpolated(
    given: Mapping[str, object], document: Document, said: Mapping[str, object], process: Mapping[str, str]
) -> tuple[dict[str, object], list[Issue]]:
    """Settings with every `${}` resolved, and what could not be."""
    resolved: dict[str, object] = dict(given)
    issues = []
    where = Settings(given, document, overridden=said).where
    for key, value in given.items():
        if not has_interpolation(value):
            continue
        try:
            resolved[key] = resolve(given, process, key)
        except InterpolationError as error:
            issues.append(Issue("config.interpolation", where(key), key, str(error), "Write the value itself."))
            resolved.pop(key)
        else:
            wrong = f"is written {value!r}" if isinstance(value, str) else "holds ${}"
            issues.append(Issue("config.interpolation-unresolved", where(key), key, wrong, "Write the value itself."))
    return resolved, issues


def _unusable(issues: Sequence[Issue], key: str) -> bool:
    return any(issue.key == key and issue.stops for issue in issues)
