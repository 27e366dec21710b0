"""`limits --reproduce`: which clusters could have produced the documented limits, as JSON, a table and a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from dpofit.errors import BadInput, Problem
from dpofit.hardware.gpus import find_gpu
from dpofit.memory.job import STACK_2024
from dpofit.memory.reproduce import GPUS_PER_NODE, SIZES, DocumentedLimit, Reproduction, Unit, reproduce
from dpofit.plan import DEFAULT_RESPONSE, JobFlags, PlannedJob, plan_jobs
from dpofit.report.console import console

CARDS = ("a100-80g", "h20-96g", "h200-141g")
FINETUNING = ("full", "lora")


def documented(planned: Sequence[PlannedJob]) -> list[str]:
    """The names of those with a documented limit. BadInput when none has one."""
    names = [plan.job.recipe.name for plan in planned
             if plan.written_for is not None and plan.written_for.documented_prompt_tokens is not None]  # fmt: skip
    if not names:
        right = "Those of qwen2.5-72b-dpo have; `dpofit list` shows them"
        raise BadInput(Problem("command line", "--reproduce", "none of the recipes has a documented limit", right))
    return names


def reproductions(names: Sequence[str], overrides: Sequence[str] = ()) -> list[Reproduction]:
    """Every cluster tried on the limits of these catalogue recipes, which all have one."""
    limits = [limit for finetuning in FINETUNING for limit in _limits(names, overrides, finetuning)]
    return reproduce(limits, [find_gpu(card) for card in CARDS])


def _limits(names: Sequence[str], overrides: Sequence[str], finetuning: str) -> list[DocumentedLimit]:
    """The limits as they were run in 2024: that year's libraries, and the AdamW transformers 4 takes by default."""
    lines = [*overrides, f"finetuning_type={finetuning}", "optim=adamw_torch"]
    flags = JobFlags(stack="2024", response=DEFAULT_RESPONSE)
    return [_limit(plan, finetuning) for plan in plan_jobs(names, lines, flags)]


def _limit(plan: PlannedJob, finetuning: str) -> DocumentedLimit:
    """Growing segments and an open end only where the source says so."""
    written = plan.written_for
    assert written is not None and written.documented_prompt_tokens is not None
    source = written.documented_source or ""
    recipe = replace(plan.job.recipe, expandable_segments="expandable_segments" in source)
    return DocumentedLimit(
        plan.job.recipe.name, finetuning, replace(plan.job, recipe=recipe), written.documented_prompt_tokens,
        DEFAULT_RESPONSE, open_ended="longer should work" in source,
    )  # fmt: skip


def clusters_json(found: Iterable[Reproduction]) -> list[dict[str, Any]]:
    """The `clusters` of `dpofit.limits/1`."""
    return [
        {
            "gpu": one.gpu.name, "gpus": one.gpus, "finetuning": one.finetuning, "unit": one.unit.name,
            "characters_per_token": one.unit.characters_per_token if one.unit.name == "characters" else None,
            "fits": list(one.fits),
            "outcomes": {limit.recipe: limit.outcome for limit in one.outcomes},
            "all_at_once": one.all_at_once,
            "host_bytes_per_node": one.host_bytes,
        }
        for one in found
    ]  # fmt: skip


def print_reproductions(found: Sequence[Reproduction]) -> None:
    """GPUs that could have produced each limit, a row for each card, method and unit; 100 columns."""
    out = console()
    out.print(f"GPUs (in nodes of {GPUS_PER_NODE}) on which each documented limit could have come about, stack of 2024")
    table = Table(box=None, pad_edge=False)
    for heading in ("tuning", "k counts", "card", *(str(number) for number, _ in enumerate(_recipes(found), 1)), "all"):
        table.add_column(heading)
    for row in _grouped(found):
        table.add_row(*_cells(row))
    out.print(table)
    for number, recipe in enumerate(_recipes(found), 1):
        out.print(f"{number}: {recipe}")
    out.print("could: not oom at the limit, and a quarter more not certain to fit. docs/documented-limits.md")


def _recipes(found: Sequence[Reproduction]) -> list[str]:
    return [limit.recipe for limit in found[0].outcomes]


def _grouped(found: Sequence[Reproduction]) -> list[list[Reproduction]]:
    groups: dict[tuple[str, Unit, str], list[Reproduction]] = {}
    for one in found:
        groups.setdefault((one.finetuning, one.unit, one.gpu.name), []).append(one)
    return list(groups.values())


def counted(unit: Unit) -> str:
    return unit.name if unit.name == "tokens" else f"{unit.name}, {unit.language}"


def _cells(row: Sequence[Reproduction]) -> list[str]:
    first = row[0]
    each = [sizes([one.gpus for one in row if recipe in one.fits]) for recipe in _recipes(row)]
    return [first.finetuning, counted(first.unit), first.gpu.name, *each, sizes([o.gpus for o in row if o.all_at_once])]


def sizes(gpus: Sequence[int]) -> str:
    """`[8, 16, 64]` → `8-16, 64`: neighbours in SIZES as a range."""
    runs: list[list[int]] = []
    for size in gpus:
        if runs and SIZES.index(size) == SIZES.index(runs[-1][-1]) + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def markdown_tables(found: Sequence[Reproduction]) -> dict[str, str]:
    """The generated tables of docs/documented-limits.md, by name."""
    recipes = [name.rpartition("/")[2] for name in _recipes(found)]
    headings = ["tuning", "k counts", "card", *(f"`{name}`" for name in recipes), "all at once"]
    return {
        "clusters": _markdown(headings, [_cells(row) for row in _grouped(found)]),
        "allocated": _markdown(
            ["tuning", "k counts", "GPUs", *(f"`{name}`" for name in recipes)], _allocated_rows(found)
        ),
        "answer": _answer(found),
    }


def _allocated_rows(found: Sequence[Reproduction]) -> list[list[str]]:
    shown = [one for one in found if one.gpu.name == CARDS[0] and one.gpus in (8, 32, 96, 256)]
    return [
        [one.finetuning, counted(one.unit), str(one.gpus),
         *(f"{limit.allocated_bytes / 2**30:.1f}" for limit in one.outcomes)]
        for one in shown
    ]  # fmt: skip


def _answer(found: Sequence[Reproduction]) -> str:
    lines = []
    for row in _grouped(found):
        first = row[0]
        together = [one for one in row if one.all_at_once]
        what = f"**{first.finetuning}, {counted(first.unit)}, {first.gpu.name}**"
        if together:
            hosts = [one.host_bytes / 2**30 for one in (together[0], together[-1])]
            ram = f"{min(hosts):,.0f} to {max(hosts):,.0f} GiB" if len(together) > 1 else f"{hosts[0]:,.0f} GiB"
            lines.append(f"- {what}: {sizes([one.gpus for one in together])} GPUs, {ram} of RAM a node.")
        else:
            lines.append(f"- {what}: no size. {_why_not(row)}")
    return "\n".join([*_likeliest(found), "", *lines])


def _likeliest(found: Sequence[Reproduction]) -> list[str]:
    """Of the clusters that agree with all limits, for each tuning and unit the one whose card they fill most."""
    agreeing = [one for one in found if one.all_at_once]
    if not agreeing:
        return ["None does."]
    words = [
        f"{len(agreeing)} of the {len(found)} combinations tried do, so the notes alone do not decide it. A limit is a",
        "wall where the card is nearly full at it. By that measure (allocated and overhead at each limit, in the order",
        "of the presets) the best of each tuning and unit, best first:",
        "",
    ]
    best: dict[tuple[str, Unit], Reproduction] = {}
    for one in sorted(agreeing, key=lambda one: -min(one.fullness, 2 - one.fullness)):
        best.setdefault((one.finetuning, one.unit), one)
    for number, one in enumerate(best.values(), 1):
        shares = ", ".join(f"{limit.card_share:.0%}" for limit in one.outcomes)
        words.append(
            f"{number}. {one.finetuning}, {counted(one.unit)}: {one.gpus} x {one.gpu.name}, {shares} of the card."
        )
    return words


def _why_not(row: Sequence[Reproduction]) -> str:
    """Limit by limit, what stands against it where the others could be; at the most GPUs when nothing could."""
    nearest = max(row, key=lambda one: (len(one.fits), one.gpus))
    words = {"too-long": "would not run", "room-left": "would run a quarter longer too"}
    against = [f"`{limit.recipe.rpartition('/')[2]}` {words[limit.outcome]}" for limit in nearest.outcomes
               if limit.outcome != "could"]  # fmt: skip
    return f"Nearest is {nearest.gpus} GPUs, where {' and '.join(against)}."


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(headings)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


STACK = f"transformers {STACK_2024.transformers}, DeepSpeed {STACK_2024.deepspeed}, torch {STACK_2024.torch}"
