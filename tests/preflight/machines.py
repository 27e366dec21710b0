"""Recorded machines: what NVML, the network and the limits of real kinds of node look like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpofit.launch.inventory import Card, Inventory
from dpofit.launch.machine import Interface, Machine
from dpofit.launch.preflight.compare import Participant, places

GIB = 2**30
# PCI addresses of an eight-GPU HGX board, in NVML's order.
BUSES = ("07", "0F", "47", "4E", "87", "90", "B7", "BD")


def card(number: int, node: int = 0, *, name: str = "NVIDIA A100-SXM4-80GB", used_bytes: int = 0) -> Card:
    bus = f"00000000:{BUSES[number % 8]}:00.0"
    uuid = f"GPU-{node:04x}{number:04x}-0000-0000-0000-000000000000"
    users = ((4242 + number, used_bytes),) if used_bytes >= GIB else ()
    return Card(number, uuid, bus, name, 85_000_000_000, used_bytes, users)


def machine(gpus: int = 8, node: int = 0, **changes: Any) -> Machine:
    """A healthy node; `node` gives it cards, addresses and a boot id of its own."""
    healthy = Machine(
        hostname=f"gpu{node:02d}",
        boot_id=f"{node:08d}-0000-0000-0000-000000000000",
        inventory=Inventory(tuple(card(number, node) for number in range(gpus)), "550.54.15", (12, 4)),
        interfaces=(
            Interface("lo", ("127.0.0.1", "::1"), "00:00:00:00:00:00"),
            Interface("eth0", (f"10.0.0.{node + 1}",), f"02:00:00:00:00:{node:02x}"),
        ),
        shm_bytes=500 * GIB,
        cores=96,
        compilers=("c++", "g++", "ninja"),
        versions={"torch": "2.6.0", "deepspeed": "0.16.4", "nvidia-nccl-cu12": "2.21.5"},
        torch_cuda="12.4",
    )
    return replace(healthy, **changes)


def node(number: int, ranks: int = 8, **changes: Any) -> Participant:
    """One node's report at a rendezvous, its ranks numbered through."""
    here = machine(changes.pop("gpus", ranks), number, **changes)
    pairs = [(number * ranks + local, local) for local in range(ranks)]
    return Participant(number, here, places(here, here.environment, pairs))


def single(rank: int, here: Machine, visible: str | None, local_rank: int = 0) -> Participant:
    """One process that speaks for one rank, with its own CUDA_VISIBLE_DEVICES."""
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    here = replace(here, environment=environment)
    return Participant(rank, here, places(here, environment, [(rank, local_rank)]))
