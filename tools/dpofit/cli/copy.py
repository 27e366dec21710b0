"""`dpofit copy`: a recipe of the catalogue into a run folder of one's own."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from dpofit.errors import BadInput, Problem
from dpofit.recipe.catalogue import read_yaml, written_for
from dpofit.recipe.load import read_recipe, resolve_reference
from dpofit.recipe.long_context import PIECES
from dpofit.recipe.run_folder import run_folder_files


def command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A name from `dpofit list`, or your own YAML, JSON or run folder.")
    ],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Run folder, made if missing.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the files named below if they exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.copy/1.")] = False,
) -> None:
    """Copy a recipe, the catalogue's or your own, into a run folder.

    It gets recipe.yaml, dpofit.yaml (environment, with reasons) and ds.json (DeepSpeed). recipe.yaml stays a pure
    LLaMA-Factory YAML and names ds.json by its absolute path. Nothing is overwritten without --force.

    \b
    Examples:
      dpofit copy qwen2.5-72b-dpo/full-z3 runs/first
      dpofit copy lora-1gpu "runs/with spaces" --force
      dpofit copy my_dpo.yaml runs/mine
    """
    if not directory.strip():  # an unset shell variable, most likely
        raise BadInput(Problem("command line", "DIR", "is empty", "Name a folder, or . for this one"))
    folder = Path(directory)
    path = resolve_reference(recipe)
    read = read_recipe(str(path))
    if read.recipe is None:
        raise BadInput([issue.problem() for issue in read.issues if issue.stops])
    files = run_folder_files(read, path, folder.absolute())
    _refuse_overwriting(folder, files, force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        wrong = f"cannot be written ({error.strerror})"
        raise BadInput(Problem(str(folder), "DIR", wrong, "Name a folder that can be")) from None
    environment = read_yaml(folder / "dpofit.yaml").get("env") or {}
    if as_json:
        document = {
            "schema": "dpofit.copy/1",
            "recipe": read.recipe.name,
            "folder": str(folder.absolute()),
            "files": list(files),
            "environment": environment,
            "long_context": [piece for piece in PIECES if piece in read.recipe.long_context],
            "output_dir": read.settings["output_dir"],
        }
        print(json.dumps(document, indent=2))
        return
    print(f"{read.recipe.name} → {folder.absolute()}: {', '.join(files)}")
    settings = read.settings
    print(f"output_dir is {settings['output_dir']} and dataset_dir is {settings['dataset_dir']}, relative to where")
    print("training starts; with several nodes write paths that every node sees. Then, on every node:")
    card = written_for(path)
    print(f"  cd {shlex.quote(str(folder.absolute()))}")
    for name, value in environment.items():
        print(f"  export {name}={shlex.quote(value)}")
    if card is not None and card.nodes > 1:
        print(f"  export NNODES={card.nodes} NODE_RANK=… MASTER_ADDR=… MASTER_PORT=…")
    stock = "  # runs stock, without the long-context pieces" if read.recipe.long_context else ""
    print(f"  llamafactory-cli train recipe.yaml{stock}")
    switches = "switches the pieces on, " if read.recipe.long_context else ""
    print(f"or, which sets all of that, {switches}checks the machine first and guards the saves:")
    print(f"  dpofit launch {shlex.quote(str(folder.absolute()))}")


def _refuse_overwriting(folder: Path, files: dict[str, str], force: bool) -> None:
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise BadInput(Problem(str(folder), "DIR", "is a file", "Name a folder"))
    existing = [folder / name for name in files if os.path.exists(folder / name)]
    if existing and not force:
        right = "Name another folder, or add --force to replace it"
        raise BadInput([Problem(str(path), None, "exists already", right) for path in existing])
