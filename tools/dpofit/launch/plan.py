"""What a launch will run on this node: one command, the variables it sets, the folder where its state lies."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dpofit.launch.environment import Variable, masked
from dpofit.launch.topology import Topology
from dpofit.recipe.catalogue import catalogue_file

PLAN_FILE = "plan.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything needed to start, and later to find and stop, this node's part of a job."""

    command: tuple[str, ...]
    variables: tuple[Variable, ...]
    folder: Path  # working directory of the job
    state: Path  # DIR/.dpofit/<host>
    output_dir: Path
    recipe: str
    title: str


def torchrun_command(topology: Topology, recipe: Path, overrides: Sequence[str], port: int | None) -> tuple[str, ...]:
    """`torchrun …` for this node; `port` is used where the topology leaves it open."""
    address = f"{topology.master_addr}:{topology.master_port or port}"
    command = [sys.executable, "-m", "dpofit.train.torchrun"]
    if topology.rdzv_id is not None:
        nodes = str(topology.nodes)
        if topology.min_nodes is not None and topology.max_nodes is not None:
            nodes = f"{topology.min_nodes}:{topology.max_nodes}"
        command += ["--nnodes", nodes, "--nproc-per-node", str(topology.processes), "--rdzv-id", topology.rdzv_id]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address]
    else:
        command += ["--nnodes", str(topology.nodes), "--node-rank", str(topology.node_rank)]
        command += ["--nproc-per-node", str(topology.processes)]
        command += ["--master-addr", topology.master_addr, "--master-port", str(topology.master_port or port)]
    if topology.max_restarts:
        command += ["--max-restarts", str(topology.max_restarts)]
    return (*command, "-m", "dpofit.train", str(recipe), *overrides)


def single_command(recipe: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """One process without torchrun, as LLaMA-Factory itself starts on one GPU."""
    return (sys.executable, "-m", "dpofit.train", str(recipe), *overrides)


def accelerate_command(topology: Topology, recipe: Path, overrides: Sequence[str]) -> str:
    """The same job for those who start everything with accelerate."""
    words = ["accelerate", "launch", "--multi_gpu", "--num_processes", str(topology.world_size)]
    if topology.nodes > 1:
        words += ["--num_machines", str(topology.nodes), "--machine_rank", str(topology.node_rank)]
        words += ["--main_process_ip", topology.master_addr, "--main_process_port", str(topology.master_port)]
    return shlex.join(
        [*words, "--mixed_precision", "no", "-m", "dpofit.train", str(recipe), *map(masked_override, overrides)]
    )


def run_folder(recipe: Path) -> Path:
    """DIR of a recipe: its own folder; the working directory for a recipe of the catalogue."""
    return Path.cwd() if catalogue_file(recipe) else recipe.resolve().parent


def state_folder(run_folder: Path) -> Path:
    """Where this host keeps pid, log and flags; hosts that share DIR don't meet."""
    return run_folder / ".dpofit" / socket.gethostname()


def write_plan(plan: Plan) -> None:
    """Keep the plan for `status`, `stop` and the detached supervisor."""
    plan.state.mkdir(parents=True, exist_ok=True)
    document = asdict(plan)
    for name in ("folder", "state", "output_dir"):
        document[name] = str(document[name])
    document["variables"] = [[v.name, v.value, v.why] for v in plan.variables]
    path = plan.state / PLAN_FILE
    path.touch(mode=0o600)  # overrides may hold a token
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def read_plan(state: Path) -> Plan | None:
    """The plan last written in `state`, None if there is none, or none that we wrote."""
    try:
        document = json.loads((state / PLAN_FILE).read_text(encoding="utf-8"))
        return Plan(
            tuple(document["command"]),
            tuple(Variable(*triple) for triple in document["variables"]),
            Path(document["folder"]), Path(document["state"]), Path(document["output_dir"]),
            document["recipe"], document["title"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shown(plan: Plan, python: str = "python") -> str:
    """The plan as shell text that runs the same thing; secrets masked."""
    lines = [f"cd {shlex.quote(str(plan.folder))}"]
    lines += [f"export {v.name}={shlex.quote(masked(v.name, v.value))}  # {v.why}" for v in plan.variables]
    words = [python if word == sys.executable else masked_override(word) for word in plan.command]
    return "\n".join([*lines, shlex.join(words)])


def masked_override(word: str) -> str:
    """`key=value` as it may be shown."""
    key, separator, value = word.partition("=")
    return f"{key}={masked(key, value)}" if separator else word


def job_environment(plan: Plan, process: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the job."""
    return {**process, **{variable.name: variable.value for variable in plan.variables}}
