"""`dpofit check`: a recipe's mistakes and surprises, before anything runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dpofit.findings import Finding, findings_json
from dpofit.recipe.check import check_exit_code, check_recipe

_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A catalogue name, or any LLaMA-Factory YAML or JSON.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override a key.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Check against this card, such as v100-32g.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.check/1.")] = False,
) -> None:
    """Check a LLaMA-Factory recipe: unknown keys, wrong types, combinations that are refused, switches that do nothing.

    Exit 0: no errors. 1: LLaMA-Factory would refuse it. 2: not readable as a recipe (unknown key, wrong type …).
    Every finding has an id of docs/checks.md.

    \b
    Examples:
      dpofit check my_dpo.yaml
      dpofit check my_dpo.yaml bf16=true deepspeed=ds_z3.json
      dpofit check qwen2.5-72b-dpo/full-z3 --json | jq '.findings[].id'
      dpofit check my_dpo.yaml --gpu t4-16g
    """
    card = None
    if gpu is not None:
        from dpofit.hardware.gpus import find_gpu

        card = find_gpu(gpu)
    findings = check_recipe(recipe, overrides or (), gpu=card)
    if as_json:
        print(json.dumps(findings_json("check", findings, recipe=recipe), indent=2, ensure_ascii=False))
    else:
        _print_findings(recipe, findings)
    raise typer.Exit(check_exit_code(findings))


def _print_findings(recipe: str, findings: tuple[Finding, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 1, 0))
    for finding in findings:
        where = ", ".join(evidence.where for evidence in finding.evidence)
        lines = [finding.title, finding.cause, finding.fix and f"→ {finding.fix}"]
        body = Text("\n".join(line for line in lines if line))
        body.append(f"\n{where}  {finding.id}", style="dim")
        table.add_row(Text(finding.severity, style=_COLOURS[finding.severity]), body)
    console = Console(highlight=False)
    console.width = min(console.width, 100)
    console.print(table)
    counts = [f"{sum(finding.severity == kind for finding in findings)} {kind}" for kind in _COLOURS]
    console.print(Text(f"{recipe}: {', '.join(counts)}" if findings else f"{recipe}: nothing to say"))
