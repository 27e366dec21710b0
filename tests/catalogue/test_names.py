"""A recipe's name finds its file; a name that means nothing, or too much, is refused with the choices."""

from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.recipe import catalogue
from dpofit.recipe.cards import all_recipes, card_of
from dpofit.recipe.catalogue import (
    card_environment,
    catalogue_root,
    find_recipe,
)
from dpofit.recipe.load import resolve_reference

RECIPES = catalogue_root() / "recipes"


@pytest.fixture
def three_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "recipes" / "family"
    folder.mkdir(parents=True)
    for version in (1, 2, 10):
        (folder / f"full.v{version}.yaml").touch()
    monkeypatch.setattr(catalogue, "catalogue_root", lambda: tmp_path)
    return folder


def test_a_name_with_family_and_version_is_that_file() -> None:
    assert find_recipe("qwen2.5-72b-dpo/full-z3.v1") == RECIPES / "qwen2.5-72b-dpo/full-z3.v1.yaml"


def test_a_name_without_version_is_the_newest_by_number(three_versions: Path) -> None:
    assert find_recipe("family/full") == three_versions / "full.v10.yaml"


def test_an_older_version_is_still_found(three_versions: Path) -> None:
    assert find_recipe("full.v2") == three_versions / "full.v2.yaml"


def test_a_name_without_family_is_enough_when_one_family_has_it() -> None:
    assert find_recipe("qlora-1gpu") == RECIPES / "qwen2.5-7b-dpo/qlora-1gpu.v1.yaml"


def test_a_name_that_two_families_have_is_refused_with_both_choices() -> None:
    with pytest.raises(BadInput, match=r"qwen2\.5-72b-dpo/full-z3, qwen2\.5-7b-dpo/full-z3"):
        find_recipe("full-z3")


@pytest.mark.parametrize(
    "name", ["", "full", "full-z3.v2", "qwen2.5-72b-dpo", "card", "presets", "../qwen2.5-7b-dpo/card"]
)
def test_a_name_the_catalogue_has_not_is_none(name: str) -> None:
    assert find_recipe(name) is None


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="full-z3-unsloth-gc"):
        resolve_reference("full-z3-unslot-gc")


def test_a_file_of_ones_own_has_no_card(tmp_path: Path) -> None:
    own = tmp_path / "full-z3.v1.yaml"
    own.touch()
    assert card_of(own) is None
    assert card_environment(own) == {}


def test_the_environment_is_the_knobs_own() -> None:
    assert card_environment(RECIPES / "qwen2.5-72b-dpo/full-z3-no-expandable.v1.yaml") == {
        "OPTIM_TORCH": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    }


def test_the_documented_limits_are_the_field_notes_in_tokens() -> None:
    documented = {
        entry.file.name: entry.card.documented.prompt_tokens for entry in all_recipes() if entry.card.documented
    }
    assert documented == {
        "full-z3": 8 * 1024,
        "full-z3-liger-unsloth-gc": 10 * 1024,
        "full-z3-offload-liger-unsloth-gc": 12 * 1024 + 512,
    }
