#!/usr/bin/env python3
"""Renders the newest version of every recipe from its family's card.yaml and presets.yaml.

    python scripts/render_recipes.py             write what is new; refuses to change a released file
    python scripts/render_recipes.py --release   the same, then add the new files to recipes/checksums.txt
    python scripts/render_recipes.py --check     write nothing; exit 1 when a file differs, is missing or is orphaned
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from dpofit.errors import BadInput
from dpofit.recipe.cards import read_family_card, read_presets
from dpofit.recipe.render import file_name, render

ROOT = Path(__file__).resolve().parents[1]
CHECKSUMS = Path("recipes/checksums.txt")
RAISE = "a released file never changes: raise its version in card.yaml and say in `versions` what changed"


def rendered_recipes(root: Path) -> dict[Path, str]:
    """Path under `root` → text, for the newest version of every recipe of every card."""
    presets = read_presets(root / "recipes/presets.yaml")
    texts = {}
    for card_path in sorted(root.glob("recipes/*/card.yaml")):
        family = read_family_card(card_path)
        for name, card in family.recipes.items():
            texts[card_path.parent.relative_to(root) / file_name(name, card)] = render(family, name, presets)
    return texts


def frozen_files(root: Path) -> set[Path]:
    """Files a release freezes: every recipe, and the DeepSpeed configs they name."""
    recipes = set(root.glob("recipes/*/*.yaml")) - set(root.glob("recipes/*/card.yaml"))
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
    older = {path for path in checksums if path.suffix == ".yaml"} - texts.keys()
    for path in sorted(present - texts.keys() - older):
        if path.suffix == ".yaml":
            found.append(f"{path}: no card has an entry for it")
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
    print(*found, sep="\n", file=sys.stderr) if found else None
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
