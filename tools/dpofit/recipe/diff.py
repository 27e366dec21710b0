"""`dpofit diff`: what differs between two recipes once defaults, overrides, DeepSpeed and environment are in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpofit.errors import BadInput
from dpofit.recipe.keys import COMMA_LISTS, deepspeed_keys, known_keys
from dpofit.recipe.load import ReadRecipe, read_recipe
from dpofit.recipe.long_context import PIECES
from dpofit.recipe.secrets import masked
from dpofit.recipe.settings import Settings

Section = Literal["settings", "deepspeed", "environment", "long_context"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One key with its value on each side; `*_given` is false where a default fills in (None: no default known)."""

    section: Section
    key: str
    left: Any
    right: Any
    left_given: bool
    right_given: bool


def read_side(reference: str, overrides: Sequence[str], environment: Mapping[str, str] | None = None) -> ReadRecipe:
    """One side. BadInput when it is not readable as a recipe; a recipe that would be refused can still be compared."""
    read = read_recipe(reference, overrides, environment)
    if problems := [issue.problem() for issue in read.issues if issue.kind.refuses]:
        raise BadInput(problems)
    return read


def differences(left: ReadRecipe, right: ReadRecipe) -> tuple[Difference, ...]:
    """Every difference: settings in LLaMA-Factory's terms, then DeepSpeed's, the environment's, long-context pieces."""
    return (
        *_settings(left.settings, right.settings),
        *_flat("deepspeed", _deepspeed(left), _deepspeed(right), _deepspeed_defaults()),
        *_flat("environment", left.environment, right.environment, {}),
        *_pieces(left.run.long_context, right.run.long_context),
    )


def _settings(left: Settings, right: Settings) -> Iterator[Difference]:
    for key in sorted({*left.given, *right.given} & set(known_keys())):
        if _comparable(left, key) != _comparable(right, key):
            values = (masked(key, left[key]), masked(key, right[key]))
            yield Difference("settings", key, *values, key in left, key in right)


def _pieces(left: frozenset[str], right: frozenset[str]) -> Iterator[Difference]:
    for piece in PIECES:
        if (piece in left) != (piece in right):
            yield Difference("long_context", piece, piece in left, piece in right, piece in left, piece in right)


def _comparable(settings: Settings, key: str) -> Any:
    """`a,b` and [a, b] mean the same; so do 1 and 1.0; an inline DeepSpeed config is compared by its content below."""
    value = settings[key]
    if key == "deepspeed" and isinstance(value, Mapping):
        return "(inline)"
    return settings.names(key) if key in COMMA_LISTS and value is not None else value


def _flat(
    section: Section, left: Mapping[str, Any], right: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[Difference]:
    for key in sorted({*left, *right}):
        values = (left.get(key, defaults.get(key)), right.get(key, defaults.get(key)))
        if values[0] != values[1]:
            yield Difference(section, key, masked(key, values[0]), masked(key, values[1]), key in left, key in right)


def _deepspeed(read: ReadRecipe) -> dict[str, Any]:
    """The config as dotted keys, comments (`_comment`) left out; empty without DeepSpeed."""
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                if not str(key).startswith("_"):
                    walk(inner, f"{path}.{key}" if path else str(key))
        elif path:
            flat[path] = value

    walk(read.deepspeed.config if read.deepspeed else {}, "")
    return flat


def _deepspeed_defaults() -> dict[str, Any]:
    """DeepSpeed's own defaults, dotted, of the sections it types."""
    defaults = {f"zero_optimization.{name}": key.default for name, key in deepspeed_keys("zero_optimization").items()}
    for section in ("offload_optimizer", "offload_param"):
        for name, key in deepspeed_keys(section).items():
            defaults[f"zero_optimization.{section}.{name}"] = key.default
    return defaults
