#!/usr/bin/env python3
"""Renders the newest version of every recipe from its family's card.yaml and presets.yaml.

python scripts/render_recipes.py             write what is new; refuses to change a released file
python scripts/render_recipes.py --release   the same, then add the new files to recipes/checksums.txt
python scripts/render_recipes.py --check     write nothing; exit 1 on a changed, missing or orphaned file
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.recipe.cards import FamilyCard, read_family_card, read_presets
from dpofit.recipe.render import render

ROOT = Path(__file__).resolve().parents[1]
CHECKSUMS = Path("recipes/checksums.txt")
RAISE = "a released file never changes: raise its version in card.yaml and say in `versions` what changed"


def families(root: Path) -> list[FamilyCard]:
    """Every card.yaml under recipes/, validated; its `family` must be its folder's name."""
    cards = {path.parent.name: read_family_card(path) for path in sorted(root.glob("recipes/*/card.yaml"))}
    for folder, card in cards.items():
        if card.family != folder:
            raise BadInput(Problem(f"recipes/{folder}/card.yaml", "family", f"is {card.family}", f"Write {folder}"))
    return list(cards.values())


def rendered_recipes(root: Path) -> dict[Path, str]:
    """Path under `root` → text, for the newest version of every recipe of every card."""
    presets = read_presets(root / "recipes/presets.yaml")
    return {
        recipe_path(family.family, name, card.version): render(family, name, presets)
        for family in families(root)
        for name, card in family.recipes.items()
    }


def carded_recipes(root: Path) -> set[Path]:
    """Path under `root` of every version of every recipe that a card has an entry for."""
    return {
        recipe_path(family.family, name, version)
        for family in families(root)
        for name, card in family.recipes.items()
        for version in card.versions
    }


def recipe_path(family: str, name: str, version: int) -> Path:
    return Path("recipes") / family / f"{name}.v{version}.yaml"


def frozen_files(root: Path) -> set[Path]:
    """Files a release freezes: every recipe, and the DeepSpeed configs they name."""
    recipes = {path for path in root.glob("recipes/**/*.y*ml") if path.name not in ("card.yaml", "presets.yaml")}
    return {path.relative_to(root) for path in recipes | set(root.glob("deepspeed/*.json"))}


def read_checksums(root: Path) -> dict[Path, str]:
    """recipes/checksums.txt, in the format of sha256sum: path → digest."""
    file = root / CHECKSUMS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {Path(path): digest for digest, path in (line.split("  ", 1) for line in lines)}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def problems(root: Path) -> list[str]:
    """What is wrong with the tree as it stands."""
    found = []
    texts, checksums, present = rendered_recipes(root), read_checksums(root), frozen_files(root)
    for path, text in texts.items():
        if path not in present:
            found.append(f"{path}: not rendered yet")
        elif (root / path).read_text(encoding="utf-8") != text:
            found.append(f"{path}: differs from its card and preset; {RAISE}")
    for path in sorted(present - checksums.keys()):
        found.append(f"{path}: not in {CHECKSUMS}; release it with --release")
    for path, digest in checksums.items():
        if path not in present:
            found.append(f"{path}: released, but gone")
        elif sha256(root / path) != digest:
            found.append(f"{path}: released, but changed; {RAISE}")
    recipes, carded = {path for path in present if path.suffix != ".json"}, carded_recipes(root)
    found += [f"{path}: no card has an entry for this version" for path in sorted(recipes - carded)]
    found += [f"{path}: a card speaks of it, but it is not there" for path in sorted(carded - recipes - texts.keys())]
    return found


def write(root: Path) -> list[str]:
    """Writes what differs; returns refusals, for released files."""
    refused = []
    checksums = read_checksums(root)
    for path, text in rendered_recipes(root).items():
        target = root / path
        if target.exists() and target.read_text(encoding="utf-8") == text:
            continue
        if path in checksums:
            refused.append(f"{path}: {RAISE}")
            continue
        target.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return refused


def release(root: Path) -> None:
    """Adds files that have no checksum yet."""
    checksums = read_checksums(root)
    for path in frozen_files(root) - checksums.keys():
        checksums[path] = sha256(root / path)
    lines = [f"{digest}  {path.as_posix()}\n" for path, digest in sorted(checksums.items())]
    (root / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing, exit 1 on drift")
    mode.add_argument("--release", action="store_true", help="add new files to recipes/checksums.txt")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    options = parser.parse_args()
    try:
        found = problems(options.root) if options.check else write(options.root)
    except BadInput as bad:
        print(bad, file=sys.stderr)
        return 2
    if options.release and not found:
        release(options.root)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
