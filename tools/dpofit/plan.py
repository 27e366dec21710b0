"""A recipe's name and the flags of a planning command become a Job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.hardware.calibration import Calibration, read_calibration
from dpofit.hardware.cluster import Cluster, Gpu
from dpofit.hardware.flags import cluster_from
from dpofit.memory.job import Job, Lengths
from dpofit.memory.lengths import FewLongest, few_longest, longest_and_mix, read_lengths
from dpofit.memory.stack import parse_stack
from dpofit.models.known import find_model
from dpofit.recipe.card_limits import unable
from dpofit.recipe.catalogue import WrittenFor, newest, recipe_files, written_for
from dpofit.recipe.load import LoadedRecipe, load_recipe
from dpofit.recipe.long_context import with_option
from dpofit.recipe.notes import Note
from dpofit.recipe.recipe import Recipe

DEFAULT_GPU, DEFAULT_NODES = "a100-80g", 1
LONGEST_ROW = 100_000_000  # tokens; more is a slip of the keyboard
DEFAULT_RESPONSE = 1024  # the field notes' rule: answers up to 1k


@dataclass(frozen=True, slots=True)
class JobFlags:
    """The flags as given; None: not given."""

    gpu: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    host_ram: str | None = None
    disk: str | None = None
    prompt: int | None = None
    response: int | None = None
    chosen: int | None = None
    rejected: int | None = None
    lengths: Path | None = None
    no_padding: bool = False
    stack: str = "pinned"
    long_context: str | None = None
    calibration: Path | None = None


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A Job, the shorter batches that run beside it (None: unknown), and remarks on what was assumed."""

    job: Job
    mix: tuple[Lengths, ...] | None
    notes: tuple[Note, ...]
    written_for: WrittenFor | None
    few: FewLongest | None = None  # of a file of lengths: the pairs that set the peak alone


def plan_job(reference: str, overrides: Sequence[str], flags: JobFlags) -> PlannedJob:
    """Resolve recipe, model, cluster and lengths; BadInput carries the problems of all of them at once."""
    problems: list[Problem] = []

    def attempt(action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except BadInput as bad:
            problems.extend(bad.problems)
            return None

    environment = attempt(with_option, os.environ, flags.long_context)
    loaded: LoadedRecipe | None = attempt(load_recipe, reference, overrides, environment)
    stack = attempt(parse_stack, flags.stack)
    written = written_for(loaded.recipe.source) if loaded else None
    cluster_notes = attempt(_cluster, flags, written)
    calibration = attempt(read_calibration, flags.calibration) if flags.calibration else None
    lengths = attempt(_sane_lengths, flags, loaded)
    model = attempt(find_model, loaded.recipe.model, loaded.recipe.source.parent) if loaded else None
    if problems or loaded is None or model is None or cluster_notes is None or lengths is None:
        raise BadInput(problems)
    cluster, notes = cluster_notes
    _refuse_card(loaded.recipe, cluster.gpu)
    if calibration is not None:
        cluster = _calibrated(cluster, calibration, flags)
    longest, mix, few, more = lengths
    notes = [*loaded.notes, *notes, *more]
    recipe = loaded.recipe
    if not stack.at_least("transformers", "5.0") and "optim" not in recipe.settings:
        recipe = replace(recipe, optim="adamw_torch")  # transformers 4.x training_args.py default
        notes.append(Note("optim-of-stack", "optim is not set: transformers 4 takes adamw_torch, the foreach AdamW."))
    return PlannedJob(Job(recipe, model, cluster, longest, stack), mix, tuple(notes), written, few)


def _cluster(flags: JobFlags, written: WrittenFor | None) -> tuple[Cluster, list[Note]]:
    given = (flags.gpu, flags.nodes, flags.gpus_per_node)
    if written is not None and given == (None, None, None):
        ram = flags.host_ram or written.host_ram
        cluster = cluster_from(written.gpu, written.nodes, written.gpus_per_node, ram, flags.disk)
        text = (
            f"No cluster given: the one the recipe is written for, {written.nodes} x {written.gpus_per_node} "
            f"{written.gpu} with {ram} a node."
        )
        return cluster, [Note("cluster-of-card", text)]
    gpu = flags.gpu or DEFAULT_GPU
    nodes = DEFAULT_NODES if flags.nodes is None else flags.nodes
    cluster = cluster_from(gpu, nodes, flags.gpus_per_node, flags.host_ram, flags.disk)
    notes = []
    if None in (flags.gpu, flags.nodes):
        text = f"Assumed where not given: {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}."
        notes.append(Note("cluster-assumed", text))
    return cluster, notes


def _refuse_card(recipe: Recipe, gpu: Gpu) -> None:
    """BadInput for what the card can't do: emulated bf16 takes memory that is not modelled."""
    asked = unable(
        gpu.name, gpu.compute_capability, bf16=recipe.bf16, pure_bf16=recipe.pure_bf16, attention=recipe.flash_attn
    )
    if problems := [Problem(str(recipe.source), found.key, found.wrong, found.right) for found in asked]:
        raise BadInput(problems)


def _calibrated(cluster: Cluster, calibration: Calibration, flags: JobFlags) -> Cluster:
    """The cluster with what a run on it showed; BadInput when that run's cards were others."""
    if calibration.gpu != cluster.gpu.name:
        wrong = f"was measured on {calibration.gpu}, this job is on {cluster.gpu.name}"
        raise BadInput(
            Problem(str(flags.calibration), "--calibration", wrong, "Predict for that card, or leave it out")
        )
    return replace(cluster, calibration=calibration)


_Found = tuple[Lengths, tuple[Lengths, ...] | None, FewLongest | None, list[Note]]


def _sane_lengths(flags: JobFlags, loaded: LoadedRecipe | None) -> _Found:
    found = _lengths(flags, loaded)
    tokens = found[0].row_tokens
    if tokens > LONGEST_ROW:
        wrong = f"{tokens:,} is more than any model takes"
        raise BadInput(Problem("command line", "tokens of the longest row", wrong, "Check cutoff_len and the lengths"))
    return found


def _lengths(flags: JobFlags, loaded: LoadedRecipe | None) -> _Found:
    problems = _length_problems(flags)
    if problems:
        raise BadInput(problems)
    cutoff = loaded.recipe.cutoff_len if loaded else 0
    padded = not flags.no_padding and not (loaded is not None and loaded.recipe.packing)
    if flags.lengths is not None:
        pairs = read_lengths(flags.lengths)
        longest, mix = longest_and_mix(pairs, padded)
        return longest, mix, few_longest(pairs, padded), _cutoff_note(longest, cutoff)
    if (flags.prompt, flags.response, flags.chosen, flags.rejected) == (None, None, None, None):
        text = f"No lengths given: every row is cutoff_len, {cutoff:,} tokens; other batches shorter."
        answers = 0
        if loaded is not None and loaded.recipe.long_context:  # what a pair costs depends on how much of it is answer
            answers = min(DEFAULT_RESPONSE, cutoff // 2)
            text += f" Answers of {answers:,} tokens."
        return Lengths(cutoff - answers, answers, answers, padded), None, None, [Note("lengths-assumed", text)]
    response = DEFAULT_RESPONSE if flags.response is None else flags.response
    chosen = response if flags.chosen is None else flags.chosen
    rejected = response if flags.rejected is None else flags.rejected
    prompt = max(cutoff - max(chosen, rejected), 8) if flags.prompt is None else flags.prompt
    longest = Lengths(prompt, chosen, rejected, padded)
    return longest, None, None, _cutoff_note(longest, cutoff)


def _length_problems(flags: JobFlags) -> list[Problem]:
    problems = []
    for name, value in (
        ("--prompt", flags.prompt), ("--response", flags.response), ("--chosen", flags.chosen),
        ("--rejected", flags.rejected),
    ):  # fmt: skip
        if value is not None and value < 1:
            problems.append(Problem("command line", name, f"{value} is not a number of tokens", "Give 1 or more"))
    tokens = (flags.prompt, flags.response, flags.chosen, flags.rejected)
    if flags.lengths is not None and tokens != (None, None, None, None):
        wrong = "both a file of lengths and single lengths"
        problems.append(Problem("command line", "--lengths", wrong, "Give one of them"))
    if flags.response is not None and flags.chosen is not None and flags.rejected is not None:
        wrong = "--response says the same as --chosen and --rejected"
        problems.append(Problem("command line", "--response", wrong, "Leave it out"))
    return problems


def _cutoff_note(longest: Lengths, cutoff: int) -> list[Note]:
    row = longest.prompt + max(longest.chosen, longest.rejected)
    if row <= cutoff:
        return []
    text = f"cutoff_len {cutoff:,} would cut rows of {row:,} tokens; planned as if it were raised."
    return [Note("cutoff-truncates", text)]


def plan_jobs(references: Sequence[str], overrides: Sequence[str], flags: JobFlags) -> list[PlannedJob]:
    """A job for each recipe; a family's name stands for its newest recipes. BadInput carries all problems."""
    if not references:
        raise BadInput(Problem("command line", "RECIPE", "no recipe", "Give names or paths; overrides are KEY=VALUE"))
    names = [name for reference in references for name in _members(reference)]
    planned: list[PlannedJob] = []
    problems: list[Problem] = []
    for name in dict.fromkeys(names):
        try:
            planned.append(plan_job(name, overrides, flags))
        except BadInput as bad:
            problems += bad.problems
    if problems:
        raise BadInput(list(dict.fromkeys(problems)))
    return planned


def _members(reference: str) -> list[str]:
    """The newest recipes of a family, or the reference itself."""
    files = newest(recipe_files())
    members = [file.full_name for file in files if file.family == reference]
    return members if members and not os.path.exists(reference) else [reference]
