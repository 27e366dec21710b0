"""How many nodes and processes a job has, and which node this is, by LLaMA-Factory's, Slurm's or Kubeflow's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dpofit.errors import BadInput, Problem

DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class Topology:
    """`processes` per node. `master_port` None: one node, any free port. `source` says who set the numbers."""

    nodes: int = 1
    node_rank: int = 0
    processes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    rdzv_id: str | None = None  # elastic: nodes find their rank at the rendezvous
    min_nodes: int | None = None
    max_nodes: int | None = None
    max_restarts: int = 0
    source: str = "this machine alone"

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def elastic(self) -> bool:
        return self.rdzv_id is not None


def read_topology(environment: Mapping[str, str], visible_gpus: int) -> Topology:
    """The topology that the environment names; `visible_gpus` is the number of processes where nothing says.

    NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT, RDZV_ID, MIN_NNODES, MAX_NNODES and MAX_RESTARTS are
    LLaMA-Factory's (launcher.py 58-101); PET_* are torchrun's own, set by Kubeflow's operator; SLURM_* Slurm's.
    BadInput lists every value that makes no sense.
    """
    problems: list[Problem] = []

    def number(value: str | None, name: str, least: int) -> int | None:
        if value is None or value == "":
            return None
        if not value.strip().isdigit() or int(value) < least:
            problems.append(Problem("environment", name, f"is {value!r}", f"Write a number from {least} up."))
            return None
        return int(value)

    def first(*names: str, least: int = 0) -> int | None:
        for name in names:
            if (value := number(environment.get(name), name, least)) is not None:
                return value
        return None

    source = "this machine alone"
    if environment.get("NNODES") or environment.get("RDZV_ID"):
        source = "NNODES"
    elif environment.get("PET_NNODES"):
        source = "PET_NNODES (Kubeflow)"
    elif environment.get("SLURM_NODEID") and environment.get("SLURM_JOB_NODELIST"):
        source = "Slurm"
    nodes = _nodes(environment, source, problems)
    node_rank = first("NODE_RANK", *_RANK_NAMES[source]) or 0
    # Kubeflow writes the word too, for torchrun to resolve: PET_NPROC_PER_NODE=auto means one per GPU.
    pet = environment.get("PET_NPROC_PER_NODE", "")
    processes = first("NPROC_PER_NODE", least=1) or (number(pet, "PET_NPROC_PER_NODE", 1) if pet.isdigit() else None)
    address = environment.get("MASTER_ADDR") or environment.get("PET_MASTER_ADDR")
    port = first("MASTER_PORT", "PET_MASTER_PORT", least=1)
    if source == "Slurm":
        address = address or first_host(environment["SLURM_JOB_NODELIST"])
        port = port or slurm_port(environment.get("SLURM_JOB_ID", "0"))
    elastic = environment.get("RDZV_ID") or None
    if nodes > 1 and not address:
        right = "Set it to the address of node 0, the same on every node."
        problems.append(Problem("environment", "MASTER_ADDR", f"is missing for {nodes} nodes", right))
    if nodes > 1 and node_rank >= nodes and elastic is None:
        right = f"Number the nodes from 0 to {nodes - 1}."
        problems.append(Problem("environment", "NODE_RANK", f"is {node_rank} of {nodes} nodes", right))
    if port is not None and port > 65535:
        problems.append(Problem("environment", "MASTER_PORT", f"is {port}", "Choose a port below 65536."))
    topology = Topology(
        nodes=nodes,
        node_rank=node_rank,
        processes=processes or max(1, visible_gpus),
        master_addr=address or "127.0.0.1",
        master_port=port or (DEFAULT_PORT if nodes > 1 else None),
        rdzv_id=elastic,
        min_nodes=first("MIN_NNODES", least=1),
        max_nodes=first("MAX_NNODES", least=1),
        max_restarts=first("MAX_RESTARTS") or 0,
        source=source,
    )
    if topology.min_nodes and topology.max_nodes and topology.min_nodes > topology.max_nodes:
        wrong = f"is {topology.min_nodes}, MAX_NNODES {topology.max_nodes}"
        problems.append(Problem("environment", "MIN_NNODES", wrong, "Write the smaller number first."))
    if problems:
        raise BadInput(problems)
    return topology


_RANK_NAMES: dict[str, tuple[str, ...]] = {
    "this machine alone": (),
    "NNODES": (),
    "PET_NNODES (Kubeflow)": ("PET_NODE_RANK", "RANK"),  # PyTorchJob sets RANK to the pod's number
    "Slurm": ("SLURM_NODEID",),
}


def _nodes(environment: Mapping[str, str], source: str, problems: list[Problem]) -> int:
    name = {"NNODES": "NNODES", "PET_NNODES (Kubeflow)": "PET_NNODES", "Slurm": "SLURM_JOB_NUM_NODES"}.get(source)
    if name is None:
        return 1
    text = environment.get(name, "1") or "1"
    if match := re.fullmatch(r"(\d+):(\d+)", text):  # torchrun's elastic MIN:MAX
        text = match[2]
    if not text.isdigit() or int(text) < 1:
        problems.append(Problem("environment", name, f"is {text!r}", "Write the number of nodes."))
        return 1
    return int(text)


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: `gpu[003-010,012],login1` → `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", nodelist.strip())
    if match is None:
        return nodelist
    return match[1] + (match[2] or "") + (match[3] or "")


def slurm_port(job_id: str) -> int:
    """A port that differs between jobs that share a node: 20000 + the job's number modulo 20000."""
    digits = re.sub(r"\D", "", job_id)
    return 20_000 + int(digits or 0) % 20_000
