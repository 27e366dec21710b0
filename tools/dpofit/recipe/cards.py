"""What card.yaml and presets.yaml may say; unknown keys and wrong types are refused, all at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from yaml import YAMLError

from dpofit.errors import BadInput, Problem
from dpofit.recipe.catalogue import CatalogueFile, catalogue_file, catalogue_root, read_yaml
from dpofit.recipe.long_context import PIECES
from dpofit.units import parse_bytes

Value = bool | int | float | str
_Model = TypeVar("_Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Variable(_Strict):
    """An environment variable and the reason for it."""

    value: str
    why: str


class Knob(_Strict):
    """One choice that changes memory: LLaMA-Factory keys, environment, long-context pieces, and why."""

    settings: Mapping[str, Value] = Field(default_factory=dict)
    env: Mapping[str, Variable] = Field(default_factory=dict)
    long_context: tuple[str, ...] = ()
    why: str

    @field_validator("long_context", mode="before")
    @classmethod
    def _tuple(cls, pieces: object) -> object:
        return _pieces(pieces) if isinstance(pieces, list) else pieces


class Preset(_Strict):
    """A named set of knobs."""

    title: str
    knobs: tuple[str, ...]

    @field_validator("knobs", mode="before")
    @classmethod
    def _tuple(cls, knobs: object) -> object:
        return tuple(knobs) if isinstance(knobs, list) else knobs


class Presets(_Strict):
    """presets.yaml: knobs, presets, defaults, and a recipe file's layout (section → key → comment)."""

    knobs: Mapping[str, Knob]
    presets: Mapping[str, Preset]
    defaults: Mapping[str, Value]
    layout: Mapping[str, Mapping[str, str]]

    def knobs_of(self, preset: str) -> dict[str, Knob]:
        """The knobs of a preset, in its order."""
        return {name: self.knobs[name] for name in self.presets[preset].knobs}


class Hardware(_Strict):
    """The cluster a recipe is written for. `gpu` is a profile name of dpofit; `host_ram` is one node's."""

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    gpu: str
    host_ram: str

    @field_validator("host_ram")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        parse_bytes(text)
        return text

    @property
    def world_size(self) -> int:
        """GPUs over all nodes."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} {self.gpu}, {self.host_ram}"


class Documented(_Strict):
    """A prompt limit that someone else reported, and where."""

    prompt_tokens: int
    source: str


class RecipeCard(_Strict):
    """What the YAML of one recipe can't say. `prompt_tokens + response_tokens` is its cutoff_len."""

    version: int = Field(ge=1)
    preset: str
    title: str | None = None  # None: the preset's
    hardware: Hardware
    prompt_tokens: int = Field(ge=1)
    response_tokens: int = Field(ge=1)
    settings: Mapping[str, Value]
    env: Mapping[str, Variable] = Field(default_factory=dict)
    long_context: Mapping[str, bool] = Field(default_factory=dict)  # over the preset's pieces
    documented: Documented | None = None
    versions: Mapping[int, str]  # what changed in each version
    history: str = ""  # how it was in 2024
    notes: str = ""

    @field_validator("long_context")
    @classmethod
    def _known_pieces(cls, switches: Mapping[str, bool]) -> Mapping[str, bool]:
        _pieces(list(switches))
        return switches


class FamilyCard(_Strict):
    """card.yaml: what a family's recipes share, and a card for each."""

    family: str
    title: str
    settings: Mapping[str, Value]
    hardware: Mapping[str, Hardware]
    recipes: Mapping[str, RecipeCard]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A recipe file with what its family's card says about it."""

    file: CatalogueFile
    card: RecipeCard


def read_family_card(path: Path) -> FamilyCard:
    """A family's card.yaml; BadInput with every problem in it."""
    return _validated(FamilyCard, path)


def read_presets(path: Path | None = None) -> Presets:
    """presets.yaml (the catalogue's own by default); BadInput with every problem in it."""
    return _validated(Presets, path or catalogue_root() / "recipes" / "presets.yaml")


def card_of(path: Path) -> RecipeCard | None:
    """What the family's card says about a catalogue recipe; None for a file that is not in the catalogue."""
    file = catalogue_file(path)
    return None if file is None else read_family_card(path.parent / "card.yaml").recipes[file.name]


def all_recipes() -> tuple[CatalogueEntry, ...]:
    """Newest version of every recipe, with its card; families by name, recipes in their card's order."""
    entries = []
    for card_path in sorted((catalogue_root() / "recipes").glob("*/card.yaml")):
        for name, card in read_family_card(card_path).recipes.items():
            path = card_path.parent / f"{name}.v{card.version}.yaml"
            entries.append(CatalogueEntry(CatalogueFile(card_path.parent.name, name, card.version, path), card))
    return tuple(entries)


def environment_of(card: RecipeCard, presets: Presets) -> dict[str, Variable]:
    """Environment with reasons: what the preset's knobs need, the card's own over it."""
    variables: dict[str, Variable] = {}
    for knob in presets.knobs_of(card.preset).values():
        variables.update(knob.env)
    return {**variables, **card.env}


def _pieces(names: list[str]) -> tuple[str, ...]:
    """The names, all of them pieces; ValueError names those that are not."""
    if unknown := [name for name in names if name not in PIECES]:
        raise ValueError(f"no long-context piece: {', '.join(map(str, unknown))}; there are {', '.join(PIECES)}")
    return tuple(names)


def pieces_of(card: RecipeCard, presets: Presets) -> frozenset[str]:
    """Long-context pieces that the preset's knobs switch on, the card's own switches over them."""
    on = {piece for knob in presets.knobs_of(card.preset).values() for piece in knob.long_context}
    on |= {piece for piece, wanted in card.long_context.items() if wanted}
    return frozenset(on - {piece for piece, wanted in card.long_context.items() if not wanted})


def piece_reasons(presets: Presets) -> dict[str, str]:
    """Piece → why one switches it on: the text of the knob that is this piece alone."""
    return {knob.long_context[0]: knob.why for knob in presets.knobs.values() if len(knob.long_context) == 1}


def _validated(model: type[_Model], path: Path) -> _Model:
    try:
        return model.model_validate(read_yaml(path))
    except YAMLError as error:
        raise BadInput(Problem(str(path), None, f"is not YAML: {error}", "")) from None
    except ValidationError as error:
        raise BadInput([_problem(path, found) for found in error.errors()]) from None


def _problem(path: Path, found: ErrorDetails) -> Problem:
    key = ".".join(map(str, found["loc"]))
    return Problem(str(path), key, found["msg"], f"Found {json.dumps(found['input'], default=str)[:80]}")
