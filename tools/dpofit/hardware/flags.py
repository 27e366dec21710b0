"""Turns the cluster flags of a command line into a Cluster, with every problem at once."""

from __future__ import annotations

from dpofit.errors import BadInput, Problem
from dpofit.hardware.cluster import Cluster, Gpu
from dpofit.hardware.gpus import find_gpu
from dpofit.units import parse_bytes

_WHERE = "command line"
MOST_NODES, MOST_GPUS_PER_NODE = 100_000, 1_000  # beyond every cluster


def cluster_from(
    gpu: str,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    host_ram: str | None = None,
    disk: str | None = None,
) -> Cluster:
    """A Cluster from `--gpu`, `--nodes`, `--gpus-per-node`, `--host-ram` and `--disk` (per node).

    `gpus_per_node` None means the cards visible here for `--gpu auto`, else 8. `host_ram` may be `auto`:
    this machine's. Raises BadInput naming every wrong flag.
    """
    problems: list[Problem] = []
    card: Gpu | None = None
    visible_cards = 8
    try:
        if gpu.strip().lower() == "auto":
            from dpofit.hardware.nvml import read_this_machine

            card, visible_cards = read_this_machine()
        else:
            card = find_gpu(gpu)
    except BadInput as error:
        problems += error.problems
    for flag, count, most in (("--nodes", nodes, MOST_NODES), ("--gpus-per-node", gpus_per_node, MOST_GPUS_PER_NODE)):
        if count is not None and count < 1:
            problems.append(Problem(_WHERE, flag, f"{count} is not a number of things", "Give 1 or more"))
        elif count is not None and count > most:
            problems.append(Problem(_WHERE, flag, f"{count:,} is more than there are", f"Give {most:,} or fewer"))
    host_ram_bytes = _ram_bytes(host_ram, problems)
    disk_bytes = _size("--disk", disk, problems)
    if problems or card is None:
        raise BadInput(problems)
    per_node = visible_cards if gpus_per_node is None else gpus_per_node
    return Cluster(card, nodes, per_node, host_ram_bytes, disk_bytes)


def _ram_bytes(text: str | None, problems: list[Problem]) -> int | None:
    if text is not None and text.strip().lower() == "auto":
        from dpofit.hardware.host import read_host_ram

        return read_host_ram().ram_bytes
    return _size("--host-ram", text, problems)


def _size(flag: str, text: str | None, problems: list[Problem]) -> int | None:
    if text is None:
        return None
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        problems.append(Problem(_WHERE, flag, str(error), ""))
        return None
    if size_bytes < 2**30:
        problems.append(Problem(_WHERE, flag, f"{text!r} is less than 1 GiB", "Write the unit, such as 1000GiB"))
        return None
    return size_bytes
