"""Remarks on how a recipe was understood, and on popular switches that do nothing in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpofit.recipe.deepspeed import DeepSpeedConfig
from dpofit.recipe.issue import Issue
from dpofit.recipe.kinds import KINDS
from dpofit.recipe.recipe import Recipe
from dpofit.recipe.settings import Settings


@dataclass(frozen=True, slots=True)
class Note:
    """One remark; `id` is stable."""

    id: str
    text: str


def notes(
    recipe: Recipe, settings: Settings, deepspeed: DeepSpeedConfig | None, issues: Sequence[Issue]
) -> tuple[Note, ...]:
    """Remarks of a recipe that loaded, one an id."""
    found = []
    if deepspeed is not None and deepspeed.found_in == "recipe folder":
        text = (
            f"deepspeed: read {deepspeed.source}, beside the recipe; LLaMA-Factory looks in the working directory only."
        )
        found.append(Note("deepspeed-beside-recipe", text))
    if deepspeed is not None and deepspeed.found_in == "example":
        text = f"deepspeed: {deepspeed.source} is not here; planned with LLaMA-Factory's own example of that name."
        found.append(Note("deepspeed-example", text))
    if any(issue.id == "config.interpolation-unresolved" for issue in issues):
        found.append(Note("interpolation-resolved", KINDS["config.interpolation-unresolved"].why))
    if not settings.on("do_train"):
        found.append(Note("no-do-train", "do_train is not true: LLaMA-Factory would not train; planned as if it did."))
    if recipe.liger and "answer_logps" not in recipe.long_context and recipe.stage not in ("pt", "sft"):
        found.append(Note("liger-no-fused-loss", KINDS["config.liger-no-fused-loss"].why))
    if settings.on("gradient_checkpointing") and not settings.on("disable_gradient_checkpointing"):
        found.append(Note("gradient-checkpointing-already-on", KINDS["config.gradient-checkpointing-on"].why))
    if not recipe.evaluates and (settings["eval_dataset"] or settings.number("val_size")):
        found.append(Note("eval-data-unused", KINDS["config.eval-data-unused"].why))
    return tuple(found)
