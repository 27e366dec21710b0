"""The environment a recipe runs in: card or preset, then the run folder's dpofit.yaml, then the process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpofit.recipe.allocator_conf import ALLOCATOR_VARIABLES, allocator_issues
from dpofit.recipe.catalogue import card_environment
from dpofit.recipe.issue import Issue
from dpofit.recipe.long_context import RUN_FILE, RUN_KEY, VARIABLE
from dpofit.recipe.yaml_file import read_document

ALLOWED = re.compile(
    r"(?:NCCL|PYTORCH|TORCH|CUDA|DS|DPOFIT)_[A-Z0-9_]+|OMP_NUM_THREADS|OPTIM_TORCH|UNSLOTH_BLOCK_COMPILE"
)


def run_environment(recipe: Path, process: Mapping[str, str]) -> tuple[dict[str, str], list[Issue]]:
    """Variables that matter to a run of this recipe, later sources winning; what is wrong with them.

    DPOFIT_LONG_CONTEXT is left out: it is one of the sources of Recipe.long_context (long_context.py).
    """
    run_file, issues = _run_file_environment(recipe.with_name(RUN_FILE))
    allowed = {name: value for name, value in process.items() if ALLOWED.fullmatch(name) and name != VARIABLE}
    # The two allocator names mean the same thing: a later source's replaces an earlier source's other name.
    merged: dict[str, str] = {}
    for source in (card_environment(recipe), run_file, allowed):
        if any(name in source for name in ALLOCATOR_VARIABLES):
            for name in ALLOCATOR_VARIABLES:
                merged.pop(name, None)
        merged.update(source)
    return merged, [*issues, *allocator_issues(merged)]


def expandable_segments(environment: Mapping[str, str]) -> bool | None:
    """True or False where the environment says so; None leaves it to the launcher, which turns it on.

    llamafactory 0.9.5 launcher.py 80-83: its torchrun branch sets expandable_segments:True unless OPTIM_TORCH=0.
    """
    for name in ALLOCATOR_VARIABLES:
        if name in environment:
            said = re.findall(r"expandable_segments\s*:\s*(true|false)", environment[name], re.I)
            if said:
                return str(said[-1]).lower() == "true"
            break
    return None if launcher_sets_allocator(environment) else False


def launcher_sets_allocator(environment: Mapping[str, str]) -> bool:
    """Whether llamafactory-cli would overwrite the allocator's settings (extras/misc.py 258 is_env_enabled)."""
    return environment.get("OPTIM_TORCH", "1").lower() in ("true", "y", "1")


def extra_keys_allowed(process: Mapping[str, str]) -> bool:
    """ALLOW_EXTRA_ARGS makes LLaMA-Factory drop unknown keys instead of refusing them (hparams/parser.py 261)."""
    return process.get("ALLOW_EXTRA_ARGS", "0").lower() in ("true", "y", "1")


def _run_file_environment(path: Path) -> tuple[dict[str, str], list[Issue]]:
    if not os.path.isfile(path):
        return {}, []
    document = read_document(path)
    asked = document.values.get("env") or {}
    where = document.where("env")
    if not isinstance(asked, dict):
        return {}, [Issue("config.environment", where, "env", "is not a mapping", "Write NAME: value lines under env.")]
    issues = []
    for name, value in asked.items():
        if name == VARIABLE:
            right = f"Write pieces under {RUN_KEY}."
            issues.append(Issue("config.environment", where, f"env.{name}", "may not be set here", right))
        elif not ALLOWED.fullmatch(str(name)):
            issues.append(
                Issue("config.environment", where, f"env.{name}", "may not be set here", "Export it in the shell.")
            )
        elif isinstance(value, (dict, list)) or value is None:
            issues.append(
                Issue("config.environment", where, f"env.{name}", "has no single value", "Give text or a number.")
            )
    return {str(name): _text(value) for name, value in asked.items()}, issues


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
