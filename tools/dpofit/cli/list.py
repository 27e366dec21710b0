"""`dpofit list`: the recipes of the catalogue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpofit.recipe.catalogue import CatalogueEntry, all_recipes, read_yaml

if TYPE_CHECKING:
    from dpofit.recipe.cards import Presets


_ZERO = {  # DeepSpeed file → what it does, short enough for the table
    None: "-",
    "z2": "2",
    "z2_offload": "2, opt on CPU",
    "z3": "3",
    "z3_offload_optimizer": "3, opt on CPU",
    "z3_offload": "3, all on CPU",
}


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.list/1.")] = False,
) -> None:
    """The recipes: what each trains and how, the cluster it is written for, and the prompt limit documented for it.

    \b
    Examples:
      dpofit list
      dpofit list --json | jq -r '.recipes[].recipe'
    """
    from dpofit.recipe.cards import read_presets

    presets = read_presets()
    rows = [row_of(entry, presets) for entry in all_recipes()]
    if as_json:
        print(json.dumps({"schema": "dpofit.list/1", "recipes": rows}, indent=2))
    else:
        _print_tables(rows)


def row_of(entry: CatalogueEntry, presets: Presets) -> dict[str, Any]:
    """One recipe as `--json` prints it."""
    card, settings = entry.card, read_yaml(entry.file.path)
    return {
        "recipe": f"{entry.file.family}/{entry.file.name}",
        "family": entry.file.family,
        "name": entry.file.name,
        "version": entry.file.version,
        "title": card.title or presets.presets[card.preset].title,
        "preset": card.preset,
        "stage": settings["stage"],
        "pref_loss": settings["pref_loss"],
        "finetuning_type": settings["finetuning_type"],
        "quantization_bit": settings.get("quantization_bit"),
        "deepspeed": Path(settings["deepspeed"]).stem if "deepspeed" in settings else None,
        "hardware": card.hardware.model_dump(),
        "cutoff_len": settings["cutoff_len"],
        "documented": card.documented.model_dump() if card.documented else None,
        "path": str(entry.file.path),
    }


def _print_tables(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100)
    for family in dict.fromkeys(row["family"] for row in rows):
        table = Table(title=f"{family}/", title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("recipe", overflow="fold")
        table.add_column("tuning")
        table.add_column("ZeRO")
        table.add_column("written for")
        table.add_column("cutoff", justify="right")
        table.add_column("documented\nprompt", justify="right")
        for row in rows:
            if row["family"] != family:
                continue
            hardware, documented = row["hardware"], row["documented"]
            table.add_row(
                row["name"],
                "qlora" if row["quantization_bit"] else row["finetuning_type"],
                _ZERO[row["deepspeed"]],
                f"{hardware['nodes']}x{hardware['gpus_per_node']} {hardware['gpu']}",
                f"{row['cutoff_len']:,}",
                f"{documented['prompt_tokens']:,}" if documented else "",
            )
        console.print(table)
        console.print()
    console.print("cutoff, documented prompt: tokens. dpofit show RECIPE explains one.", style="dim")
