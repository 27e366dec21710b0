"""Released files never change, rendered files never drift, and nothing lies about without a card."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.recipe.cards import read_family_card, read_presets
from dpofit.recipe.catalogue import catalogue_root
from dpofit.recipe.render import recipe_settings

Run = Callable[..., subprocess.CompletedProcess[str]]
FULL_Z3 = Path("recipes/qwen2.5-72b-dpo/full-z3.v1.yaml")


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_this_checkout_is_rendered_released_and_without_orphans(render_recipes: Run) -> None:
    done = render_recipes("--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_recipe_and_every_deepspeed_config_has_its_checksum() -> None:
    root = catalogue_root()
    lines = (root / "recipes/checksums.txt").read_text(encoding="utf-8").splitlines()
    released = {path: digest for digest, path in (line.split("  ") for line in lines)}
    files = [*root.glob("recipes/*/*.v*.yaml"), *root.glob("deepspeed/*.json")]
    assert len(files) >= 26
    assert released == {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def test_a_changed_file_fails_the_check(checkout: Path, render_recipes: Run) -> None:
    replace(checkout / FULL_Z3, "save_steps: 200", "save_steps: 100")
    done = render_recipes("--check", "--root", checkout)
    assert done.returncode == 1
    assert f"{FULL_Z3}: released, but changed" in done.stderr


def test_a_changed_deepspeed_config_fails_the_check(checkout: Path, render_recipes: Run) -> None:
    replace(checkout / "deepspeed/z3.json", '"overlap_comm": false', '"overlap_comm": true')
    done = render_recipes("--check", "--root", checkout)
    assert done.returncode == 1
    assert "deepspeed/z3.json: released, but changed" in done.stderr


def test_a_changed_preset_fails_the_check(checkout: Path, render_recipes: Run) -> None:
    replace(checkout / "recipes/presets.yaml", "save_steps: 200", "save_steps: 100")
    done = render_recipes("--check", "--root", checkout)
    assert done.returncode == 1
    assert f"{FULL_Z3}: differs from its card and preset" in done.stderr


def test_rendering_never_rewrites_a_released_file(checkout: Path, render_recipes: Run) -> None:
    before = (checkout / FULL_Z3).read_text(encoding="utf-8")
    replace(checkout / "recipes/presets.yaml", "save_steps: 200", "save_steps: 100")
    done = render_recipes("--root", checkout)
    assert done.returncode == 1
    assert f"{FULL_Z3}: a released file never changes: raise its version" in done.stderr
    assert (checkout / FULL_Z3).read_text(encoding="utf-8") == before


def test_raising_the_version_writes_and_releases_a_new_file_beside_the_old(checkout: Path, render_recipes: Run) -> None:
    before = (checkout / FULL_Z3).read_text(encoding="utf-8")
    card = checkout / "recipes/qwen2.5-72b-dpo/card.yaml"
    replace(card, "full-z3:\n    version: 1\n", "full-z3:\n    version: 2\n")
    replace(card, "learning_rate: 5.0e-7}", "learning_rate: 3.0e-7}")
    replace(card, "versions: {1: first release}", "versions: {1: first release, 2: lower learning rate}")
    done = render_recipes("--release", "--root", checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (checkout / FULL_Z3).read_text(encoding="utf-8") == before
    second = (checkout / FULL_Z3.with_name("full-z3.v2.yaml")).read_text(encoding="utf-8")
    assert "learning_rate: 3.0e-7" in second
    assert "output_dir: saves/qwen2.5-72b-dpo/full-z3.v2" in second
    assert render_recipes("--check", "--root", checkout).returncode == 0


@pytest.mark.parametrize("orphan", ["recipes/qwen2.5-72b-dpo/mine.v1.yaml", "recipes/qwen2.5-72b-dpo/deep/er.yml"])
def test_a_file_without_a_card_entry_fails_the_check(checkout: Path, render_recipes: Run, orphan: str) -> None:
    (checkout / orphan).parent.mkdir(exist_ok=True)
    (checkout / orphan).write_text("stage: dpo\n", encoding="utf-8")
    done = render_recipes("--check", "--root", checkout)
    assert done.returncode == 1
    assert f"{orphan}: no card has an entry for this version" in done.stderr


def test_a_deleted_release_fails_the_check(checkout: Path, render_recipes: Run) -> None:
    (checkout / FULL_Z3).unlink()
    done = render_recipes("--check", "--root", checkout)
    assert done.returncode == 1
    assert f"{FULL_Z3}: released, but gone" in done.stderr


def test_an_unknown_key_in_a_card_is_refused_by_name(checkout: Path, render_recipes: Run) -> None:
    replace(checkout / "recipes/qwen2.5-7b-dpo/card.yaml", "prompt_tokens: 6144", "promt_tokens: 6144")
    done = render_recipes("--check", "--root", checkout)
    assert done.returncode == 2
    assert "recipes.full-z3.prompt_tokens: Field required" in done.stderr
    assert "recipes.full-z3.promt_tokens: Extra inputs are not permitted" in done.stderr


def test_two_knobs_of_a_preset_may_not_set_the_same_key(checkout: Path) -> None:
    replace(checkout / "recipes/presets.yaml", "[full, z3, expandable-segments]", "[full, z3, z3-offload]")
    presets = read_presets(checkout / "recipes/presets.yaml")
    family = read_family_card(checkout / "recipes/qwen2.5-72b-dpo/card.yaml")
    with pytest.raises(BadInput, match="deepspeed: set by both z3 and z3-offload"):
        recipe_settings(family, "full-z3", presets)
