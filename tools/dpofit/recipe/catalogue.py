"""The recipe catalogue on disk: where it is, which file a name means, which environment its card asks for.

Kept cheap to import and to ask (`predict` uses it on every run): names are answered from file names alone;
cards are parsed and validated (cards.py) only by those who show them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dpofit
from dpofit.errors import BadInput, Problem

_RECIPE_FILE = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]*?)\.v(?P<version>[0-9]+)\.yaml")
_RECIPE_NAME = re.compile(r"(?:(?P<family>[^/]+)/)?(?P<name>[^/]+?)(?:\.v(?P<version>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class CatalogueFile:
    """One recipe file: `<family>/<name>.v<version>.yaml`."""

    family: str
    name: str
    version: int
    path: Path

    @property
    def full_name(self) -> str:
        """`qwen2.5-72b-dpo/full-z3.v1`."""
        return f"{self.family}/{self.name}.v{self.version}"


def catalogue_root() -> Path:
    """The folder that holds `recipes/` and `deepspeed/`: the checkout, or the installed package's data.

    A recipe's `deepspeed: deepspeed/z3.json` is relative to this folder.
    """
    package = Path(dpofit.__file__).resolve().parent
    installed = package / "catalogue"
    return installed if installed.is_dir() else package.parents[1]


def recipe_files() -> tuple[CatalogueFile, ...]:
    """Every recipe file, all versions, ordered by family, name, version."""
    found = []
    for path in (catalogue_root() / "recipes").glob("*/*.yaml"):
        if match := _RECIPE_FILE.fullmatch(path.name):
            found.append(CatalogueFile(path.parent.name, match["name"], int(match["version"]), path))
    return tuple(sorted(found, key=lambda file: (file.family, file.name, file.version)))


def newest(files: tuple[CatalogueFile, ...]) -> tuple[CatalogueFile, ...]:
    """The newest version of each recipe, order kept."""
    latest = {(file.family, file.name): file for file in sorted(files, key=lambda file: file.version)}
    return tuple(file for file in files if latest[file.family, file.name] is file)


def find_recipe(name: str) -> Path | None:
    """`full-z3`, `full-z3.v1`, `qwen2.5-72b-dpo/full-z3[.v1]` → its file (newest version if none is named).

    None when the catalogue has no such recipe. BadInput when several families have it and none is named.
    """
    wanted = _RECIPE_NAME.fullmatch(name.removesuffix(".yaml"))
    if wanted is None:
        return None
    matching = tuple(
        file
        for file in recipe_files()
        if file.name == wanted["name"]
        and wanted["family"] in (None, file.family)
        and wanted["version"] in (None, str(file.version))
    )
    choices = newest(matching)
    if len(choices) > 1:
        listed = ", ".join(f"{file.family}/{name}" for file in choices)
        raise BadInput(
            Problem(name, None, f"{len(choices)} families have a recipe of this name", f"Say which: {listed}")
        )
    return choices[0].path if choices else None


def catalogue_file(path: Path) -> CatalogueFile | None:
    """The catalogue's own record of a recipe file; None for a file that is not in the catalogue."""
    path = path.resolve()
    match = _RECIPE_FILE.fullmatch(path.name)
    if match is None or path.parent.parent != catalogue_root() / "recipes":
        return None
    return CatalogueFile(path.parent.name, match["name"], int(match["version"]), path)


def card_environment(path: Path) -> dict[str, str]:
    """Environment variables that a catalogue recipe's preset and card set, the card's over the preset's.

    An older version gets what its card says today. Empty for a file that is not in the catalogue.
    """
    variables: dict[str, dict[str, str]] = {}
    for source in _sources(path):
        variables.update(source.get("env", {}))
    return {name: variable["value"] for name, variable in variables.items()}


def card_pieces(path: Path) -> frozenset[str]:
    """Long-context pieces that a catalogue recipe's preset and card switch on; empty for any other file."""
    switches: dict[str, bool] = {}
    for source in _sources(path):
        said = source.get("long_context", {})
        switches.update(said if isinstance(said, dict) else dict.fromkeys(said, True))
    return frozenset(piece for piece, on in switches.items() if on)


def _sources(path: Path) -> list[dict[str, Any]]:
    """What a catalogue recipe's card.yaml and presets.yaml say of it: its preset's knobs, then its card entry."""
    file = catalogue_file(path)
    if file is None:
        return []
    recipe = read_yaml(path.parent / "card.yaml")["recipes"][file.name]
    presets = read_yaml(catalogue_root() / "recipes" / "presets.yaml")
    return [*(presets["knobs"][knob] for knob in presets["presets"][recipe["preset"]]["knobs"]), recipe]


@dataclass(frozen=True, slots=True)
class WrittenFor:
    """The cluster and lengths a catalogue recipe is written for, as its card says; unvalidated (tests validate it)."""

    gpu: str
    nodes: int
    gpus_per_node: int
    host_ram: str
    prompt_tokens: int
    response_tokens: int
    documented_prompt_tokens: int | None
    documented_source: str | None


def written_for(path: Path) -> WrittenFor | None:
    """What `predict` takes when no cluster is given; read without pydantic, for its start-up time."""
    file = catalogue_file(path)
    if file is None:
        return None
    card = read_yaml(path.parent / "card.yaml")["recipes"][file.name]
    documented = card.get("documented") or {}
    return WrittenFor(
        **card["hardware"],
        prompt_tokens=card["prompt_tokens"],
        response_tokens=card["response_tokens"],
        documented_prompt_tokens=documented.get("prompt_tokens"),
        documented_source=documented.get("source"),
    )


def read_yaml(path: Path) -> Any:
    """A YAML file of the catalogue, by libyaml where PyYAML was built with it (10 times faster). Read once: a family
    asks for its card and the presets several times a recipe. Do not change what comes back."""
    return _parsed(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _parsed(path: Path, mtime_ns: int) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
