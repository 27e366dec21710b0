"""`dpofit list`: the recipes of the catalogue."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpofit.cli.job_options import takes_job_flags
from dpofit.errors import BadInput, Problem
from dpofit.plan import JobFlags, plan_job
from dpofit.recipe.catalogue import read_yaml

if TYPE_CHECKING:
    from dpofit.recipe.cards import CatalogueEntry, Presets

_ZERO = {  # DeepSpeed file → what it does, short enough for the table
    None: "-",
    "z2": "2",
    "z2_offload": "2, opt on CPU",
    "z3": "3",
    "z3_offload_optimizer": "3, opt on CPU",
    "z3_offload": "3, all on CPU",
}


@takes_job_flags("nodes", "gpus_per_node", "host_ram")
def command(
    flags: JobFlags,
    family: Annotated[str | None, typer.Option("--family", help="Only families whose name starts so.")] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Only recipes written for this card; with --fits, the card to fit.")
    ] = None,
    fits: Annotated[
        bool, typer.Option("--fits", help="Only recipes predicted to fit the cluster of the flags.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.list/1.")] = False,
) -> None:
    """The recipes: what each trains and how, the cluster it is written for, and the prompt limit documented for it.

    --fits predicts each at its own cutoff_len on --gpu, --nodes, --gpus-per-node and --host-ram (without them, on the
    cluster it is written for). Exit code 1 when no recipe is left.

    \b
    Examples:
      dpofit list
      dpofit list --family qwen3 --gpu a100-80g
      dpofit list --fits --gpu a100-80g --nodes 2 --gpus-per-node 8 --host-ram 1000GiB
      dpofit list --json | jq -r '.recipes[].recipe'
    """
    from dpofit.recipe.cards import all_recipes, read_presets

    if not fits and (flags.nodes, flags.gpus_per_node, flags.host_ram) != (None, None, None):
        raise BadInput(Problem("command line", "--nodes, --gpus-per-node, --host-ram", "say what to fit", "Add --fits"))
    presets = read_presets()
    entries = _of_family(all_recipes(), family)
    if fits:
        entries = _fitting(entries, replace(flags, gpu=gpu))
    elif gpu is not None:
        from dpofit.hardware.gpus import find_gpu

        card = find_gpu(gpu).name
        entries = [entry for entry in entries if entry.card.hardware.gpu == card]
    rows = [row_of(entry, presets) for entry in entries]
    if as_json:
        print(json.dumps({"schema": "dpofit.list/1", "recipes": rows}, indent=2))
    elif rows:
        _print_tables(rows)
    else:
        print("No recipe is left.")
    raise typer.Exit(0 if rows else 1)


def _of_family(entries: Sequence[CatalogueEntry], family: str | None) -> list[CatalogueEntry]:
    """Entries of the families whose name starts with `family`; BadInput when there is none."""
    found = [entry for entry in entries if family is None or entry.file.family.startswith(family.lower())]
    if not found:
        names = ", ".join(dict.fromkeys(entry.file.family for entry in entries))
        raise BadInput(Problem("command line", "--family", f"no family starts with {family!r}", f"There are: {names}"))
    return found


def _fitting(entries: Sequence[CatalogueEntry], flags: JobFlags) -> list[CatalogueEntry]:
    """Entries predicted to fit; a recipe that the card can't run does not."""
    from rich.console import Console

    from dpofit.hardware.flags import cluster_from
    from dpofit.report.rows import fitting

    if flags.gpu is not None:
        cluster_from(flags.gpu, flags.nodes or 1, flags.gpus_per_node, flags.host_ram)  # bad flags are bad for all
    planned = {}
    for entry in entries:
        try:
            planned[entry.file.full_name] = plan_job(entry.file.full_name, [], flags)
        except BadInput:
            continue
    with Console(stderr=True).status(f"Predicting {len(planned)} recipes"):
        kept = dict(zip(planned, fitting([*planned.values()]), strict=True))
    return [entry for entry in entries if kept.get(entry.file.full_name)]


def row_of(entry: CatalogueEntry, presets: Presets) -> dict[str, Any]:
    """One recipe as `--json` prints it."""
    from dpofit.recipe.cards import pieces_of
    from dpofit.recipe.long_context import PIECES

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
        "long_context": [piece for piece in PIECES if piece in pieces_of(card, presets)],
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
