"""The GPUs of this machine as NVML sees them, before anything has touched them; CUDA itself is never initialised."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One physical GPU. `users` are (pid, bytes) of processes that hold memory on it; bytes 0 where hidden."""

    index: int  # NVML's: PCI bus order
    uuid: str
    bus_id: str
    name: str
    total_bytes: int
    used_bytes: int
    users: tuple[tuple[int, int], ...] = ()
    nvlinks: int | None = None  # links that are up; None where the card has none or NVML does not say
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """How two cards reach each other, in nvidia-smi topo's words: NV, PIX, PXB, PHB, NODE, SYS (best first)."""

    first: int  # Card.index
    second: int
    path: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """All cards of the machine (or container), or why they can't be read."""

    cards: tuple[Card, ...] = ()
    driver: str = ""
    cuda_driver: tuple[int, int] | None = None  # newest CUDA the driver supports
    error: str = ""
    links: tuple[Link, ...] = ()  # of every pair that NVML knows the way of


def read_inventory() -> Inventory:
    """Ask NVML; takes milliseconds and needs no CUDA context."""
    try:
        import pynvml
    except ImportError:
        return Inventory(error="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Inventory(error=f"NVML does not answer ({error})")
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        cards = tuple(_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return Inventory(cards, driver, (cuda // 1000, cuda % 1000 // 10), links=_links(pynvml, len(cards)))
    except pynvml.NVMLError as error:
        return Inventory(error=f"NVML failed ({error})")
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class Visible:
    """What CUDA_VISIBLE_DEVICES leaves: cards in CUDA's order; `invalid` is the entry CUDA stops at, `twice` any
    card named more than once (CUDA then shows none)."""

    cards: tuple[Card, ...]
    invalid: str | None = None
    twice: tuple[str, ...] = ()


def visible_cards(inventory: Inventory, environment: Mapping[str, str]) -> Visible:
    """The cards a process with this environment sees. CUDA reads entries up to the first it does not know, and sees
    nothing when one is named twice (CUDA programming guide, environment variables)."""
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return Visible(inventory.cards)
    chosen: list[Card] = []
    invalid, twice = None, []
    for entry in (part.strip() for part in asked.split(",")) if asked.strip() else ():
        card = _named(inventory.cards, entry)
        if card is None:
            invalid = entry
            break
        if card in chosen:
            twice.append(entry)
        chosen.append(card)
    return Visible(() if twice else tuple(chosen), invalid, tuple(twice))


def _named(cards: Sequence[Card], entry: str) -> Card | None:
    if re.fullmatch(r"[0-9]+", entry):
        return cards[int(entry)] if int(entry) < len(cards) else None
    found = [card for card in cards if entry.startswith("GPU-") and card.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _card(pynvml, index: int) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    # Version 2 keeps the driver's own reserve apart from what processes use.
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    try:
        users = tuple((int(p.pid), int(p.usedGpuMemory or 0)) for p in
                      pynvml.nvmlDeviceGetComputeRunningProcesses(handle))  # fmt: skip
    except pynvml.NVMLError:  # hidden by the container or the driver
        users = ()
    bus_id = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
    usable = memory.total - memory.reserved
    capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Card(index, uuid, bus_id, name, usable, memory.used, users, _nvlinks(pynvml, handle), capability)


def _nvlinks(pynvml, handle) -> int | None:
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:  # no such link on this card, or no NVLink at all
            break
    return sum(map(bool, states)) if states else None


def _links(pynvml, count: int) -> tuple[Link, ...]:
    paths = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",  # two GPUs of one board
        pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        pynvml.NVML_TOPOLOGY_NODE: "NODE",
        pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
    found = []
    for first, second in itertools.combinations(range(count), 2):
        a, b = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in (first, second))
        try:
            by_nvlink = pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            nvlink = by_nvlink == pynvml.NVML_P2P_STATUS_OK
            path = "NV" if nvlink else paths[pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)]
        except (pynvml.NVMLError, KeyError):  # hidden in some virtual machines
            continue
        found.append(Link(first, second, path))
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
