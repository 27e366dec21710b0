"""A recipe is predicted to fit the cluster it is written for; the one that can't is there to show why."""

from __future__ import annotations

import json
from collections.abc import Callable

import jsonschema
import pytest

from dpofit.recipe.cards import CatalogueEntry, all_recipes, pieces_of, read_presets
from tests.cli.schema import PREDICT

Run = Callable[..., tuple[int, str, str]]
NOT_MEANT_TO_FIT = {"full-z3-no-gc"}  # shows what gradient checkpointing buys


@pytest.mark.parametrize("entry", all_recipes(), ids=lambda entry: f"{entry.file.family}/{entry.file.name}")
def test_a_recipe_fits_the_cluster_it_is_written_for(entry: CatalogueEntry, dpofit: Run) -> None:
    code, out, _ = dpofit("predict", f"{entry.file.family}/{entry.file.name}", "--json")
    prediction = json.loads(out)
    jsonschema.validate(prediction, PREDICT)
    assert prediction["job"]["world_size"] == entry.card.hardware.world_size
    answers = 2 if pieces_of(entry.card, read_presets()) else 1  # a shared row holds both
    row = entry.card.prompt_tokens + answers * entry.card.response_tokens
    assert prediction["job"]["tokens_per_row"] == row
    if entry.file.name in NOT_MEANT_TO_FIT:
        assert (code, prediction["verdict_by"]["gpu"]) == (1, "oom")
        return
    assert code == 0
    assert prediction["verdict"] in ("fits", "tight")
    assert prediction["gpu"]["peak_bytes"] <= prediction["gpu"]["capacity_bytes"]
    assert prediction["host"]["peak_bytes"] <= prediction["host"]["capacity_bytes"]
