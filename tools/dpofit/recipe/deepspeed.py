"""Finds the DeepSpeed config a recipe names: inline, a file, or one of LLaMA-Factory's examples."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpofit.recipe.catalogue import catalogue_root
from dpofit.recipe.deepspeed_examples import EXAMPLES
from dpofit.recipe.issue import Issue
from dpofit.recipe.settings import Settings


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """The config as found: `source` names it for people; `found_in` says how, when it was not a plain path."""

    source: str
    config: Mapping[str, Any]
    found_in: str = ""  # "", "recipe folder", "catalogue", "example"


def find_deepspeed(settings: Settings) -> tuple[DeepSpeedConfig | None, list[Issue]]:
    """What `deepspeed:` means: inline, a file (working directory, recipe's folder, catalogue), or a known example."""
    asked = settings["deepspeed"]
    if not asked:
        return None, []
    if isinstance(asked, Mapping):
        return DeepSpeedConfig(f"{settings.document.path} (inline)", asked), []
    asked = str(asked)
    if asked.startswith("{"):  # JSON text, as transformers accepts it (training_args.py 1458)
        return _parse(asked, settings, settings.where("deepspeed"), "")
    written = Path(asked).expanduser()
    places = [
        (written, ""),
        (settings.document.path.parent / written, "recipe folder"),
        (catalogue_root() / written, "catalogue"),
    ]
    for path, found_in in places if not written.is_absolute() else places[:1]:
        if os.path.isfile(path):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                issue = Issue(
                    "config.deepspeed-file", str(path), "deepspeed", f"cannot be read: {error}", "Give a JSON file."
                )
                return None, [issue]
            return _parse(text, settings, str(path), found_in)
    if written.name in EXAMPLES:
        return DeepSpeedConfig(asked, EXAMPLES[written.name], "example"), []
    tried = " or ".join(str(path) for path, _ in (places[:2] if not written.is_absolute() else places[:1]))
    wrong = f"names a file that does not exist: {asked}"
    return None, [settings.issue("config.deepspeed-file", "deepspeed", wrong, f"Put it at {tried}.")]


def _parse(text: str, settings: Settings, source: str, found_in: str) -> tuple[DeepSpeedConfig | None, list[Issue]]:
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"{source}:{getattr(error, 'lineno', 1)}"
        wrong = f"is not valid JSON: {getattr(error, 'msg', 'nested too deeply')}"
        return None, [Issue("config.deepspeed-file", where, "deepspeed", wrong, "Correct the syntax.")]
    if not isinstance(config, dict):
        return None, [
            Issue("config.deepspeed-file", source, "deepspeed", "holds no JSON object", 'Write {"key": value}.')
        ]
    return DeepSpeedConfig(source, config, found_in), []
