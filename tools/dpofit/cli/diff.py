"""`dpofit diff`: what differs between two recipes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dpofit.errors import BadInput, Problem
from dpofit.recipe.diff import Difference, differences, read_side


def command(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE [KEY=VALUE]... RECIPE [KEY=VALUE]...", help="Two recipes.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.diff/1.")] = False,
) -> None:
    """What differs between two recipes: defaults filled in, overrides applied, DeepSpeed and environment included.

    Overrides belong to the recipe they follow. A value in brackets is a default.

    \b
    Examples:
      dpofit diff qwen2.5-72b-dpo/full-z3 qwen2.5-72b-dpo/full-z3-offload
      dpofit diff qwen2.5-72b-dpo/full-z3 my_dpo.yaml
      dpofit diff my_dpo.yaml my_dpo.yaml cutoff_len=16384 use_unsloth_gc=true --json
    """
    (left_name, left_overrides), (right_name, right_overrides) = _two_sides(recipes)
    left, right = read_side(left_name, left_overrides), read_side(right_name, right_overrides)
    found = differences(left, right)
    names = (" ".join([left_name, *left_overrides]), " ".join([right_name, *right_overrides]))
    if as_json:
        rows = [asdict(difference) for difference in found]
        document = {"schema": "dpofit.diff/1", "left": names[0], "right": names[1], "differences": rows}
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        _print_table(names, found)


def _two_sides(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Two recipes, each with the overrides that follow it."""
    sides: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if "=" in argument and sides and not os.path.exists(argument):
            sides[-1][1].append(argument)
        else:
            sides.append((argument, []))
    if len(sides) != 2:
        raise BadInput(
            Problem("command line", None, f"{len(sides)} recipes given", "Give two, each with its overrides.")
        )
    return sides


def _print_table(names: tuple[str, str], found: tuple[Difference, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.width = min(console.width, 100)
    if not found:
        console.print(Text("No difference."))
        return
    table = Table("", box=None, pad_edge=False)
    table.add_column("key", overflow="fold")
    for name in names:
        table.add_column(Text(name), overflow="fold")
    for difference in found:
        values = (_shown(difference.left, difference.left_given), _shown(difference.right, difference.right_given))
        table.add_row(difference.section, Text(difference.key), *map(Text, values))
    console.print(table)


def _shown(value: Any, given: bool) -> str:
    """`null` and `true` as a YAML has them; a default in brackets; a dash where nothing is known."""
    if value is None and not given:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if given else f"[{text}]"
