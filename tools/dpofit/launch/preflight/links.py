"""Findings about the ways between this machine's GPUs: NVLink or not, links that are down, measured bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dpofit.findings import Evidence, Finding
from dpofit.launch.bandwidth import Bandwidth
from dpofit.launch.inventory import Card, Link, visible_cards
from dpofit.launch.machine import Machine
from dpofit.launch.starts import Start

# PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 / 8 = 31.5 GB/s. Every NVLink since the V100 is faster in sum.
PCIE4_GB_PER_S = 31.5
_MEANING = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "the host bridges of one CPU",
    "SYS": "the link between CPUs",
}


def link_findings(machine: Machine, start: Start) -> Iterator[Finding]:
    """What NVML says of the ways between the visible cards; nothing for one card."""
    cards = visible_cards(machine.inventory, start.environment).cards
    indices = {card.index for card in cards}
    links = [link for link in machine.inventory.links if {link.first, link.second} <= indices]
    if not links:
        return
    ways = Counter(link.path for link in links)
    told = ", ".join(f"{ways[path]} by {meaning}" for path, meaning in _MEANING.items() if ways[path])
    yield Finding(
        "launch.links", "info", f"ways between {len(cards)} GPUs: {told}",
        tuple(Evidence(f"GPU {card.index}", _row(card, cards, links)) for card in cards), "", "",
    )  # fmt: skip
    if 0 < ways["NV"] < len(links):
        without = [link for link in links if link.path != "NV"]
        pairs = ", ".join(f"{link.first}-{link.second} ({link.path})" for link in without[:6])
        yield Finding(
            "launch.nvlink-not-everywhere", "warning", f"{len(without)} of {len(links)} pairs of GPUs have no NVLink",
            (Evidence("NVML", pairs + (", …" if len(without) > 6 else "")),),
            "A ring over all of them runs at the speed of its slowest way. NVLink bridges join pairs only; on a board "
            "with NVSwitch a fabric manager that is not running looks like this too.",
            "Choose GPUs that are joined (CUDA_VISIBLE_DEVICES), or systemctl status nvidia-fabricmanager.",
        )  # fmt: skip
    most = max((card.nvlinks or 0 for card in cards), default=0)
    fewer = [card for card in cards if card.nvlinks is not None and card.nvlinks < most]
    same_kind = len({card.name for card in cards}) == 1
    if fewer and same_kind:
        yield Finding(
            "launch.nvlink-down", "warning", f"GPUs with fewer NVLinks up than the best, which has {most}",
            tuple(Evidence(f"GPU {card.index}", f"{card.nvlinks} links up") for card in fewer),
            "A link that is down slows every collective of the node.",
            "nvidia-smi nvlink --status shows which; dmesg | grep -i nvlink why. Have the node looked at.",
        )  # fmt: skip


def bandwidth_findings(machine: Machine, measured: Bandwidth) -> Iterator[Finding]:
    """What nccl-tests measured, against what the links promise."""
    if measured.bus_gb_per_s is None:
        yield Finding(
            "launch.bandwidth-not-measured", "info", f"all-reduce bandwidth was not measured: {measured.error}",
            (Evidence("nccl-tests", measured.command or "all_reduce_perf"),), "",
            "Build nccl-tests and put all_reduce_perf on PATH.",
        )  # fmt: skip
        return
    seen = Evidence(measured.command, f"average bus bandwidth {measured.bus_gb_per_s:g} GB/s")
    links = machine.inventory.links
    if links and all(link.path == "NV" for link in links) and measured.bus_gb_per_s < PCIE4_GB_PER_S:
        yield Finding(
            "launch.bandwidth-low", "warning",
            f"all-reduce runs at {measured.bus_gb_per_s:g} GB/s although every pair of GPUs has NVLink",
            (seen,),
            f"That is below PCIe 4.0 x16 ({PCIE4_GB_PER_S} GB/s): NCCL does not use NVLink.",
            "unset NCCL_P2P_DISABLE; NCCL_DEBUG=INFO shows the transport of each channel (P2P, SHM, NET).",
        )  # fmt: skip
    else:
        yield Finding(
            "launch.bandwidth", "info", f"all-reduce within the node: {measured.bus_gb_per_s:g} GB/s", (seen,), "", ""
        )


def _row(card: Card, cards: tuple[Card, ...], links: list[Link]) -> str:
    paths = {frozenset((link.first, link.second)): link.path for link in links}
    return " ".join(
        ("X" if other is card else paths.get(frozenset((card.index, other.index)), "?")).rjust(4) for other in cards
    )
