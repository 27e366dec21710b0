"""Everything a launch decides and checks before it starts: topology, variables, command, forecast, findings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.findings import Finding
from dpofit.launch.environment import Variable, catalogue_source, cpu_variables, launch_variables
from dpofit.launch.forecast import Forecast, forecast
from dpofit.launch.inventory import read_inventory, visible_cards
from dpofit.launch.machine import missing_stack
from dpofit.launch.network import free_port
from dpofit.launch.output_dir import other_run, output_dir_problems, own, record
from dpofit.launch.plan import Plan, accelerate_command, run_folder, single_command, state_folder, torchrun_command
from dpofit.launch.starts import Start, closable_terminal
from dpofit.launch.state import running
from dpofit.launch.topology import Topology, read_topology
from dpofit.recipe.catalogue import written_for
from dpofit.recipe.load import ReadRecipe, read_recipe
from dpofit.train.guard.config import read_config

CPU_RANKS = "DPOFIT_CPU_RANKS"  # train on that many gloo ranks on the CPU: tiny models, and tests of the machinery
SMOKE_RANKS = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch that could start now. `stops`: why it should not."""

    read: ReadRecipe
    topology: Topology
    plan: Plan
    forecast: Forecast
    findings: tuple[Finding, ...]
    accelerate: str | None
    here: bool  # whether this machine could run it: its GPUs, or CPU ranks

    @property
    def stops(self) -> list[str]:
        reasons = [finding.title for finding in self.findings if finding.severity == "error"]
        return reasons + ["out of memory is predicted"] * (self.forecast.verdict == "oom")

    @property
    def topology_text(self) -> str:
        t = self.topology
        nodes = f"node {t.node_rank} of {t.nodes}" if t.nodes > 1 else "one node"
        processes = f"{t.processes} process{'es' * (t.processes > 1)}"
        if not self.here:
            return f"no GPU here; {nodes}, {processes} (assumed where NNODES and NPROC_PER_NODE say nothing)"
        return f"{nodes}, {processes} here ({t.source})"

    def settle_output_dir(self, force: bool) -> None:
        """Refuse an output_dir of another recipe or run, else leave this one's record in it."""
        assert self.read.recipe is not None
        output_dir, state = self.plan.output_dir, self.plan.state
        problems = [] if force else output_dir_problems(self.read.recipe, output_dir)
        if (other := other_run(output_dir, state)) is not None:
            wrong = f"another run trains into it now (pid {other.pid})"
            problems.append(Problem(str(output_dir), "output_dir", wrong, "Choose another output_dir."))
        if not problems:
            try:
                own(output_dir, state)
                if self.topology.node_rank == 0:
                    record(self.read.recipe, output_dir)
            except OSError as error:
                wrong = f"can't be written ({error.strerror})"
                problems = [Problem(str(output_dir), "output_dir", wrong, "Choose a folder you can write.")]
        if problems:
            raise BadInput(problems)


def read(reference: str, overrides: Sequence[str], environment: Mapping[str, str] | None = None) -> ReadRecipe:
    """The recipe; BadInput with every problem that stops it."""
    found = read_recipe(reference, overrides, environment)
    if found.recipe is None:
        raise BadInput([issue.problem() for issue in found.issues if issue.stops])
    return found


def prepare(
    found: ReadRecipe,
    reference: str,
    overrides: Sequence[str],
    *,
    guard_memory: str | None,
    dry_run: bool,
    detach: bool,
    calibration: Path | None = None,
) -> Prepared:
    """Decide everything for this node, from its environment and its cards. BadInput when it can't be started here."""
    assert found.recipe is not None
    recipe, environment = found.recipe, os.environ
    cpu_ranks = _cpu_ranks(environment)
    gpus = len(visible_cards(read_inventory(), environment).cards)
    topology = read_topology(environment, cpu_ranks or gpus or _written_for(found))
    problems = [] if dry_run else _cannot_start(found, gpus, cpu_ranks)
    guard = _guard_variables(guard_memory, problems)
    if problems:
        raise BadInput(problems)
    if cpu_ranks:
        predicted = Forecast(None, "not predicted: CPU ranks have no GPU memory")
    else:
        written = written_for(catalogue_source(recipe.source))
        predicted = forecast(reference, overrides, recipe.long_context, topology, gpus > 0, written, calibration)
    torchrun = bool(topology.world_size > 1 or recipe.zero or _on(environment.get("FORCE_TORCHRUN")))
    source = recipe.source.resolve()
    port = None if topology.master_port or dry_run else free_port()
    command = (
        torchrun_command(topology, source, overrides, port or 29500) if torchrun else single_command(source, overrides)
    )
    cores = len(os.sched_getaffinity(0))
    variables = list(launch_variables(recipe, environment, topology.processes, cores, torchrun))
    variables += cpu_variables(topology.processes, cores) if cpu_ranks else ()
    variables += guard
    for name, n_bytes, what in (
        ("DPOFIT_PREDICTED_GPU_BYTES", predicted.gpu_bytes, "a GPU's"),
        ("DPOFIT_PREDICTED_HOST_BYTES", predicted.host_bytes, "a node's"),
    ):
        if n_bytes is not None and gpus:
            variables.append(Variable(name, str(n_bytes), f"{what} predicted upper end; training warns above it"))
    state = state_folder(run_folder(recipe.source))
    output_dir = Path.cwd() / str(recipe.settings.get("output_dir", "trainer_output"))
    plan = Plan(command, tuple(variables), Path.cwd(), state, output_dir, str(source), recipe.name)
    if not dry_run and (other := running(state)) is not None:
        right = f"`dpofit stop {state.parent.parent}` ends it; a second run needs a folder of its own."
        raise BadInput(Problem(str(state), None, f"a run is going on here (pid {other.pid})", right))
    findings = () if dry_run else _findings(found, topology, predicted, gpus=not cpu_ranks, terminal=not detach)
    accelerate = accelerate_command(topology, source, overrides) if torchrun and not topology.elastic else None
    return Prepared(found, topology, plan, predicted, findings, accelerate, bool(gpus or cpu_ranks))


def smoke_ranks(found: ReadRecipe, environment: Mapping[str, str]) -> tuple[int, int]:
    """`(ranks, GPUs)` of a smoke run: NPROC_PER_NODE ranks if set, one for a recipe written for one GPU, else two."""
    assert found.recipe is not None
    gpus = len(visible_cards(read_inventory(), environment).cards)
    card = written_for(catalogue_source(found.recipe.source))
    one = found.recipe.zero is None and card is not None and card.nodes * card.gpus_per_node == 1
    wanted = read_topology({"NPROC_PER_NODE": environment.get("NPROC_PER_NODE", "")}, 1 if one else SMOKE_RANKS)
    ranks = min(wanted.processes, gpus) if gpus else wanted.processes
    return ranks, gpus


def _cannot_start(found: ReadRecipe, gpus: int, cpu_ranks: int) -> list[Problem]:
    problems = []
    if not gpus and not cpu_ranks:
        error = read_inventory().error or "CUDA_VISIBLE_DEVICES leaves none"
        right = (
            "`dpofit launch RECIPE --smoke` runs here, --dry-run shows what would run; `dpofit preflight` says more."
        )
        problems.append(Problem("this machine", None, f"has no GPU that can be used: {error}", right))
    return problems + missing_stack(found.deepspeed is not None)


def _findings(
    found: ReadRecipe, topology: Topology, predicted: Forecast, gpus: bool, terminal: bool
) -> tuple[Finding, ...]:
    from dpofit.launch.preflight import local_findings

    in_terminal = terminal and closable_terminal(os.environ)
    start = Start("dpofit", os.environ, processes=topology.processes, terminal=in_terminal)
    return local_findings(found, topology, start=start, checkpoint_bytes=predicted.checkpoint_bytes, gpus=gpus)


def _guard_variables(guard_memory: str | None, problems: list[Problem]) -> tuple[Variable, ...]:
    if guard_memory is None:
        return ()
    try:
        read_config({"DPOFIT_GUARD_MEMORY": guard_memory})
    except BadInput as bad:
        problems += [
            Problem("command line", "--guard-memory", problem.wrong, problem.right) for problem in bad.problems
        ]
        return ()
    return (Variable("DPOFIT_GUARD_MEMORY", guard_memory, "--guard-memory"),)


def _written_for(found: ReadRecipe) -> int:
    assert found.recipe is not None
    card = written_for(catalogue_source(found.recipe.source))
    return card.gpus_per_node if card is not None else 1


def _cpu_ranks(environment: Mapping[str, str]) -> int:
    text = environment.get(CPU_RANKS, "0") or "0"
    if not text.isdigit():
        raise BadInput(Problem("environment", CPU_RANKS, f"is {text!r}", "Write a number of ranks."))
    return int(text)


def _on(text: str | None) -> bool:
    return (text or "0").lower() in ("true", "y", "1")
