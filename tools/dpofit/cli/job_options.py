"""The options that the planning commands share: each written once, for a field of JobFlags."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dpofit.errors import BadInput, Problem
from dpofit.plan import JobFlags

OPTIONS: dict[str, Any] = {
    "gpu": Annotated[str | None, typer.Option("--gpu", help="A known card, an exact size such as 64GiB, or auto.")],
    "nodes": Annotated[int | None, typer.Option("--nodes", help="Number of nodes.")],
    "gpus_per_node": Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs of each node.")],
    "host_ram": Annotated[
        str | None, typer.Option("--host-ram", help="RAM of one node, such as 1000GiB, or auto.")
    ],
    "disk": Annotated[str | None, typer.Option("--disk", help="Free disk for checkpoints, such as 10TB.")],
    "prompt": Annotated[int | None, typer.Option("--prompt", help="Longest prompt, tokens after truncation.")],
    "response": Annotated[int | None, typer.Option("--response", help="Longest answer, tokens (both answers).")],
    "chosen": Annotated[int | None, typer.Option("--chosen", help="Longest chosen answer, tokens.")],
    "rejected": Annotated[int | None, typer.Option("--rejected", help="Longest rejected answer, tokens.")],
    "lengths": Annotated[
        Path | None,
        typer.Option("--lengths", help="Lengths of real pairs: JSON Lines, from `dpofit data --lengths-out`."),
    ],
    "no_padding": Annotated[
        bool, typer.Option("--no-padding", help="All rows have the same length: no attention mask is built.")
    ],
    "stack": Annotated[str, typer.Option("--stack", help="pinned, 2024, or LIBRARY=VERSION,…")],
    "long_context": Annotated[
        str | None,
        typer.Option("--long-context", metavar="PIECES", help="Of docs/long-context.md: names with commas, all, off."),
    ],
    "calibration": Annotated[
        Path | None, typer.Option("--calibration", help="Constants of this cluster, from `dpofit calibrate`.")
    ],
}  # fmt: skip


def takes_job_flags(*names: str, but: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command that has a parameter `flags: JobFlags`: on the command line it has, in its place, the
    options of the named fields (all without names) except `but`."""
    chosen = [field for field in fields(JobFlags) if field.name in (names or OPTIONS) and field.name not in but]
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=OPTIONS[field.name]
        )
        for field in chosen
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            flags = JobFlags(**{option.name: given.pop(option.name) for option in options})
            command(flags=flags, **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            named = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += options if parameter.name == "flags" else [named]
        # typer reads both
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipes and KEY=VALUE overrides, told apart: an argument with `=` that is no file is an override."""
    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    return [text for text in arguments if text not in overrides], overrides


def one_recipe(references: Sequence[str]) -> str:
    """The one recipe of a command that takes one."""
    if len(references) != 1:
        wrong = "no recipe" if not references else f"{len(references)} recipes: {', '.join(references)}"
        right = "Give one name or path; overrides are KEY=VALUE"
        raise BadInput(Problem("command line", "RECIPE", wrong, right))
    return references[0]
