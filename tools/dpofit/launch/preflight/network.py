"""Findings about how nodes and ranks will find each other: names, ranks, ports, interfaces, the terminal."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from dpofit.findings import Evidence, Finding
from dpofit.launch.machine import Machine
from dpofit.launch.network import port_in_use
from dpofit.launch.starts import Start
from dpofit.launch.topology import Topology


def network_findings(machine: Machine, start: Start, topology: Topology | None) -> Iterator[Finding]:
    """What can be told without asking another node; `topology` None: not known."""
    env = start.environment
    nodes = topology.nodes if topology is not None else start.nodes or _int(env.get("NNODES")) or 1
    node_rank = topology.node_rank if topology is not None else start.node_rank
    yield from _rank_names(start, nodes)
    if nodes > 1:
        address = topology.master_addr if topology is not None else env.get("MASTER_ADDR", "")
        yield from _master_address(machine, address, node_rank)
    port = topology.master_port if topology is not None else start.master_port or _int(env.get("MASTER_PORT"))
    if port is None and start.launcher in ("torchrun", "torch.distributed.launch", "deepspeed", "accelerate"):
        port = 29500  # their default, on every run of every user of the machine
    leads = nodes == 1 or node_rank in (0, None)
    if port is not None and leads and port_in_use(port):
        yield Finding(
            "launch.port-in-use", "error", f"port {port} is in use on this machine",
            (Evidence("bind", f"0.0.0.0:{port} refused"),),
            "Another job, or what is left of one, listens there: \"The server socket has failed to listen\" "
            "(EADDRINUSE, errno 98).",
            "Choose another MASTER_PORT (--master_port, --main_process_port), the same on every node.",
        )  # fmt: skip
    yield from _interfaces(machine, env)
    if env.get("SLURM_NTASKS_PER_NODE", "1").partition("(")[0] not in ("", "1") and _starts_many(start):
        yield Finding(
            "launch.slurm-tasks", "error",
            f"Slurm starts the launcher {env['SLURM_NTASKS_PER_NODE']} times on each node",
            (Evidence("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS_PER_NODE"]), Evidence("start", start.launcher)),
            "Each of them starts a rank per GPU: several ranks share each GPU (\"Duplicate GPU detected\").",
            "#SBATCH --ntasks-per-node=1; `dpofit launch RECIPE --emit slurm` writes such a script.",
        )  # fmt: skip
    if start.terminal and not start.hangup:
        yield Finding(
            "launch.sighup", "info", "closing this terminal will end the job",
            (Evidence("start", "in the foreground of a terminal, outside tmux and screen"),),
            "The terminal sends SIGHUP, and torchrun ends all ranks on it.",
            "`dpofit launch RECIPE --detach`, or tmux, screen.",
        )  # fmt: skip
    if start.hangup:
        yield Finding(
            "launch.sighup", "warning", "closing the terminal will end this job, nohup or not",
            (Evidence("start", " ".join(start.words)[:160] or start.launcher),),
            "torchrun (and accelerate and llamafactory-cli, which use it) replaces nohup's \"ignore SIGHUP\" by a "
            "handler that ends all ranks: \"Received Signals.SIGHUP death signal, shutting down workers\".",
            "`dpofit launch RECIPE --detach`, or setsid, tmux, screen.",
        )  # fmt: skip


def _rank_names(start: Start, nodes: int) -> Iterator[Finding]:
    """LLaMA-Factory reads NODE_RANK since 0.9.2; older releases and many posts say RANK (launcher.py 59)."""
    env = start.environment
    inside = "LOCAL_RANK" in env
    own_names = start.launcher in ("dpofit", "llamafactory-cli")
    kubeflow = "PET_NODE_RANK" in env or "PET_NNODES" in env
    if own_names and not inside and not kubeflow and nodes > 1 and "RANK" in env and "NODE_RANK" not in env:
        yield Finding(
            "launch.rank-instead-of-node-rank", "error", f"NNODES={nodes} with RANK, but NODE_RANK is not set",
            (Evidence("RANK", env["RANK"]), Evidence("NODE_RANK", "unset: every node takes itself for node 0")),
            "LLaMA-Factory reads NODE_RANK; RANK was the name in older releases. All nodes then wait for the others.",
            f"Set NODE_RANK={env['RANK']} on this node.",
        )  # fmt: skip


def _master_address(machine: Machine, address: str, node_rank: int | None) -> Iterator[Finding]:
    resolved = _resolve(address)
    told = (Evidence("MASTER_ADDR", address or "unset"), Evidence("this machine", ", ".join(sorted(machine.addresses))))
    if address and not resolved:
        yield Finding(
            "launch.master-address", "error", f"MASTER_ADDR {address} can't be resolved here", told,
            "This node can't find node 0.", "Use node 0's IP address.",
        )  # fmt: skip
    elif not address or any(_loopback(ip) for ip in resolved):
        yield Finding(
            "launch.master-address", "error", "MASTER_ADDR is this machine itself (loopback) in a job of several nodes",
            told, "Each node waits at its own address.", "Set it to node 0's address, the same on every node.",
        )  # fmt: skip
    elif node_rank == 0 and not resolved & machine.addresses:
        yield Finding(
            "launch.master-address", "error", f"this is node 0, but MASTER_ADDR {address} is not its address", told,
            "Node 0 must listen at MASTER_ADDR.", "Set MASTER_ADDR to an address of node 0, or number the nodes anew.",
        )  # fmt: skip
    elif node_rank not in (0, None) and resolved & machine.addresses:
        yield Finding(
            "launch.master-address", "error", f"this is node {node_rank}, but MASTER_ADDR {address} is its own address",
            told, "Each node that names itself waits alone at the rendezvous.",
            "Set MASTER_ADDR to node 0's address, the same on every node.",
        )  # fmt: skip


def _interfaces(machine: Machine, env: dict[str, str] | object) -> Iterator[Finding]:
    assert hasattr(env, "get")
    names = [interface.name for interface in machine.interfaces]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = env.get(variable)
        if not asked or matching_interfaces(asked, names):
            continue
        yield Finding(
            "launch.no-such-interface", "error", f"{variable}={asked} names no interface that is up here",
            (Evidence(variable, asked), Evidence("this machine", ", ".join(names))),
            "NCCL finds no socket interface, or hangs at the first collective; names differ between nodes.",
            "Name the interface that reaches the other nodes (ip -br addr), on each node its own.",
        )  # fmt: skip


def matching_interfaces(asked: str, names: list[str]) -> list[str]:
    """NCCL's rules: prefixes, comma separated; `=` for exact names, `^` for all but (NCCL env.html)."""
    text = asked.strip()
    exclude = text.startswith("^")
    text = text.lstrip("^")
    exact = text.startswith("=")
    wanted = [part.partition(":")[0] for part in text.lstrip("=").split(",") if part]

    def hit(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in wanted)

    return [name for name in names if hit(name) != exclude]


def _starts_many(start: Start) -> bool:
    return start.launcher != "python" and "LOCAL_RANK" not in start.environment


def _resolve(address: str) -> frozenset[str]:
    if not address:
        return frozenset()
    try:
        return frozenset(str(info[4][0]) for info in socket.getaddrinfo(address, None))
    except OSError:
        return frozenset()


def _loopback(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:
        return False


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
