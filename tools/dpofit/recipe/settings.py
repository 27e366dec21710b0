"""A recipe's flat settings with LLaMA-Factory's defaults behind them, and the checks of single values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dpofit.recipe.issue import Issue
from dpofit.recipe.keys import known_keys, nearest, out_of_range, pinned_versions, wrong_choice, wrong_type
from dpofit.recipe.overrides import COMMAND_LINE
from dpofit.recipe.retired import RETIRED
from dpofit.recipe.secrets import is_secret
from dpofit.recipe.yaml_file import Document


class Settings:
    """What the file and the overrides say, and where each key was said. Absent keys answer with their default."""

    def __init__(self, given: Mapping[str, Any], document: Document, overridden: Iterable[str] = ()) -> None:
        self.given = dict(given)
        self.document = document
        self.overridden = frozenset(overridden)

    def __getitem__(self, key: str) -> Any:
        """The value given, else LLaMA-Factory's default (KeyError for a key it does not have)."""
        known = known_keys()[key]
        return self.given.get(key, known.default)

    def __contains__(self, key: str) -> bool:
        return key in self.given

    def on(self, key: str) -> bool:
        """A switch, true where LLaMA-Factory would take it for true."""
        return bool(self[key])

    def set(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self[key] is not None

    def number(self, key: str) -> float:
        """A number, 0 when absent or null."""
        return self[key] or 0

    def names(self, key: str) -> tuple[str, ...]:
        """A comma-separated text or a list, as names (LLaMA-Factory's `split_arg`)."""
        value = self[key]
        parts = value.split(",") if isinstance(value, str) else value or ()
        return tuple(str(part).strip() for part in parts)

    def where(self, key: str | None) -> str:
        """`file:line`, or `command line` when an override said it."""
        if key in self.overridden:
            return COMMAND_LINE
        return self.document.where(key)

    def issue(self, id: str, key: str | None, wrong: str, right: str) -> Issue:
        """An issue about one of these keys, with its place filled in."""
        return Issue(id, self.where(key), key, wrong, right)


def value_issues(settings: Settings, extra_keys_allowed: bool) -> list[Issue]:
    """Unknown keys, wrong types, values outside a key's choices, unfilled values; in the order of the file."""
    if other := _other_format(settings.given):
        return [settings.issue("config.other-format", None, other, "Give a file for `llamafactory-cli train`.")]
    pinned = pinned_versions()["llamafactory"]
    issues = []
    for name, value in settings.given.items():
        key = known_keys().get(name)
        if key is None:
            if not extra_keys_allowed:
                issues.append(
                    settings.issue(
                        "config.unknown-key", name, f"is not a key of LLaMA-Factory {pinned}", _instead(name)
                    )
                )
        elif value == "???":
            issues.append(settings.issue("config.missing-value", name, "is still ???", "Fill it in."))
        elif problem := wrong_type(key, value):
            wrong = "is not text" if is_secret(name) else problem[0]
            issues.append(settings.issue("config.wrong-type", name, wrong, problem[1]))
        elif problem := out_of_range(key, value):
            issues.append(settings.issue("config.out-of-range", name, *problem))
        elif problem := wrong_choice(key, value):
            issues.append(settings.issue("config.invalid-choice", name, *problem))
        elif isinstance(value, str) and key.types <= {"bool", "null"}:
            issues.append(settings.issue("config.text-for-switch", name, f"is the text {value!r}", "Write true."))
    return issues


def _other_format(given: Mapping[str, Any]) -> str | None:
    """What else the file is, by keys that only that format has."""
    if "compute_environment" in given or "distributed_type" in given:
        return "is an accelerate config, not a recipe"
    if (
        "model" in given
        and "model_name_or_path" not in given
        and {"dist_config", "model_class", "peft_config"} & set(given)
    ):
        return "is a recipe of LLaMA-Factory's experimental v1 trainer (USE_V1=1)"
    if "zero_optimization" in given:
        return "is a DeepSpeed config, not a recipe"
    return None


def _instead(name: str) -> str:
    """What to write instead of an unknown key."""
    if name in RETIRED:
        replacement = RETIRED[name]
        return f"It was renamed: write {replacement}." if replacement else "Newer releases dropped it: remove it."
    close = nearest(name, list(known_keys()))
    return f"Did you mean {close}?" if close else "Remove it."
