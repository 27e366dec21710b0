"""`dpofit advise`: the smallest changes that make a job fit, and what would not help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from dpofit.cli.job_options import one_recipe, split_overrides, takes_job_flags
from dpofit.errors import BadInput
from dpofit.plan import JobFlags, PlannedJob, plan_job
from dpofit.recipe.long_context import written

if TYPE_CHECKING:
    from dpofit.memory.job import Job
    from dpofit.memory.levers import Change

# Both names of one setting: torch takes the newer first, some releases know only the older (recipe/environment.py).
EXPANDABLE = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")


@dataclass(frozen=True, slots=True)
class Command:
    """One command line: what `arguments` are appended to."""

    reference: str
    overrides: Sequence[str]
    flags: JobFlags
    planned: PlannedJob

    def written(self, changes: Sequence[Change]) -> tuple[list[str], dict[str, str]]:
        """Arguments that make the changes when appended to the command, and the environment they need."""
        overrides, flags, environment = self._applied(changes)
        given = {
            "--gpu": flags.gpu, "--nodes": flags.nodes, "--gpus-per-node": flags.gpus_per_node,
            "--host-ram": flags.host_ram, "--prompt": flags.prompt, "--long-context": flags.long_context,
        }  # fmt: skip
        said = {
            "--gpu": self.flags.gpu, "--nodes": self.flags.nodes, "--gpus-per-node": self.flags.gpus_per_node,
            "--host-ram": self.flags.host_ram, "--prompt": self.flags.prompt,
            "--long-context": self.flags.long_context,
        }  # fmt: skip
        changed = [text for name, value in given.items() if value != said[name] for text in (name, str(value))]
        return [*overrides, *changed], environment

    def replan(self, changes: Sequence[Change]) -> Job | None:
        """The job that the command with `written(changes)` means; None when that would be refused."""
        overrides, flags, environment = self._applied(changes)
        try:
            job = plan_job(self.reference, [*self.overrides, *overrides], flags).job
        except BadInput:
            return None
        if environment:  # what the loader reads from the process environment (recipe/environment.py)
            job = replace(job, recipe=replace(job.recipe, expandable_segments=True))
        return job

    def _applied(self, changes: Sequence[Change]) -> tuple[list[str], JobFlags, dict[str, str]]:
        flags, overrides = self.flags, list[str]()
        environment: dict[str, str] = {}
        for change in changes:
            overrides += change.overrides
            if change.nodes is not None:
                flags = replace(self._whole_cluster(flags), nodes=change.nodes, gpus_per_node=change.gpus_per_node)
            asked = (flags.prompt, flags.response, flags.chosen, flags.rejected)
            if change.prompt is not None and any(tokens is not None for tokens in asked):
                flags = replace(flags, prompt=change.prompt)
            if change.long_context:
                flags = replace(flags, long_context=written(change.long_context))
            if change.expandable:
                environment = EXPANDABLE
        return overrides, flags, environment

    def _whole_cluster(self, flags: JobFlags) -> JobFlags:
        """Flags that name the card's cluster where the command left it to the card: naming one flag drops the rest."""
        written = self.planned.written_for
        if written is None or (flags.gpu, flags.nodes, flags.gpus_per_node) != (None, None, None):
            return flags
        return replace(flags, gpu=written.gpu, host_ram=flags.host_ram or written.host_ram)


@takes_job_flags()
def command(
    arguments: Annotated[list[str], typer.Argument(metavar="RECIPE [KEY=VALUE]...", help="Name or path, overrides.")],
    flags: JobFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.advise/1.")] = False,
) -> None:
    """The smallest changes that make a job fit at its length, cheapest first, and what would not help. Exit code 1
    when nothing helps.

    Every suggestion is a line to append to the command, and is predicted to fit with it.

    \b
    Examples:
      dpofit advise full-z3-unsloth-gc --gpu a100-80g --nodes 4 --host-ram 1000GiB --prompt 8192 --response 1024
      dpofit advise my.yaml --gpu rtx4090 --gpus-per-node 1 --host-ram 64GiB
      dpofit advise my.yaml cutoff_len=16384 --disk 2TB --json | jq -r '.suggestions[0].arguments | join(" ")'
    """
    from dpofit.memory.advise import Workbench, advise
    from dpofit.memory.popular import would_not_help
    from dpofit.memory.predict import predict
    from dpofit.report.advise import advise_document, print_advice

    references, overrides = split_overrides(arguments)
    reference = one_recipe(references)
    planned = plan_job(reference, overrides, flags)
    asked = Command(reference, overrides, flags, planned)
    bench = Workbench(planned.job, planned.mix, asked.replan)
    advice = advise(bench, predict(planned.job, planned.mix))
    no_help = would_not_help(bench, advice)
    if as_json:
        print(json.dumps(advise_document(advice, no_help, asked.written), indent=2))
    else:
        print_advice(advice, no_help, asked.written)
    raise typer.Exit(0 if advice.suggestions or advice.base.verdict == "fits" else 1)
