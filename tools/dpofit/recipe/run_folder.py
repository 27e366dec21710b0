"""A run folder's files: recipe.yaml (pure LLaMA-Factory), dpofit.yaml (what that can't say), ds.json."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from dpofit.recipe.catalogue import CatalogueFile, card_of, catalogue_root
from dpofit.recipe.long_context import PIECES, RUN_KEY

_DEEPSPEED = re.compile(r"^(deepspeed: )(\S+)", re.MULTILINE)


def run_folder_files(file: CatalogueFile, folder: Path) -> dict[str, str]:
    """File name → text of the run folder that `dpofit copy` writes; `folder` is absolute.

    The recipe keeps its comments; only `deepspeed:` changes, to the folder's own ds.json.
    """
    recipe = file.path.read_text(encoding="utf-8")
    files = {"recipe.yaml": recipe, "dpofit.yaml": _dpofit_yaml(file)}
    if match := _DEEPSPEED.search(recipe):
        # A JSON string is a YAML string: quotes keep spaces, colons and hashes of the path as they are.
        target = json.dumps(str(folder / "ds.json"), ensure_ascii=False)
        files["recipe.yaml"] = recipe[: match.start(2)] + target + recipe[match.end(2) :]
        files["ds.json"] = (catalogue_root() / match[2]).read_text(encoding="utf-8")
    return files


def _dpofit_yaml(file: CatalogueFile) -> str:
    from dpofit.recipe.cards import environment_of, piece_reasons, pieces_of, read_presets

    card = card_of(file.path)
    assert card is not None
    lines = [
        "# dpofit's side of this run: what recipe.yaml, which stays pure LLaMA-Factory, can't say.",
        f"recipe: {file.full_name}",
        "env:",
    ]
    presets = read_presets()
    for name, variable in environment_of(card, presets).items():
        lines += [f"  # {variable.why}", f"  {name}: {json.dumps(variable.value)}"]
    lines += ["# For `dpofit launch`: the same training, computed otherwise. Plain llamafactory-cli runs stock."]
    lines += [f"{RUN_KEY}:"]
    on, reasons = pieces_of(card, presets), piece_reasons(presets)
    for piece in PIECES:
        lines += textwrap.wrap(reasons[piece], 116, initial_indent="  # ", subsequent_indent="  # ")
        lines += [f"  {piece}: {json.dumps(piece in on)}"]
    return "\n".join(lines) + "\n"
