"""Reads this machine's cards through NVML, for `--gpu auto`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpofit.errors import BadInput, Problem
from dpofit.hardware.cluster import Gpu
from dpofit.hardware.profiles import PROFILES, UNKNOWN_CARD_CONTEXT
from dpofit.units import format_gib


@dataclass(frozen=True, slots=True)
class Reading:
    """One card as NVML sees it, before this process has touched it."""

    name: str
    uuid: str
    usable_bytes: int  # total less what the driver reserves: what torch will report as total
    used_by_others_bytes: int
    compute_capability: tuple[int, int]


def read_this_machine() -> tuple[Gpu, int]:
    """The tightest visible card of this machine, and how many are visible; BadInput without NVML or cards."""
    readings = visible(_read_nvml(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not readings:
        raise BadInput(_problem("CUDA_VISIBLE_DEVICES leaves no card visible"))
    return tightest(readings), len(readings)


def tightest(readings: Sequence[Reading]) -> Gpu:
    """The card with the least memory left by others, with the speeds of its profile where its name has one."""
    reading = min(readings, key=lambda card: card.usable_bytes - card.used_by_others_bytes)
    free_bytes = reading.usable_bytes - reading.used_by_others_bytes
    profile = _profile_of(reading)
    source = (
        f"NVML on this machine: {reading.name}, {format_gib(reading.usable_bytes)} less "
        f"{format_gib(reading.used_by_others_bytes)} used by others, the least of {len(readings)}"
    )
    capability = reading.compute_capability
    if profile is None:
        context_bytes, context_source = UNKNOWN_CARD_CONTEXT
        return Gpu(
            reading.name, free_bytes, f"{source}; {context_source}", context_bytes, compute_capability=capability
        )
    context_source = profile.source.rpartition("; ")[2]
    return replace(
        profile, capacity_bytes=free_bytes, source=f"{source}; {context_source}", compute_capability=capability
    )


def visible(readings: Sequence[Reading], cuda_visible_devices: str | None) -> list[Reading]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, by index or UUID; like CUDA, up to the first invalid entry.

    Indices are taken in PCI bus order, which is CUDA's own only under CUDA_DEVICE_ORDER=PCI_BUS_ID or when the
    cards are alike.
    """
    if cuda_visible_devices is None:
        return list(readings)
    chosen: list[Reading] = []
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        if entry.isdigit() and int(entry) < len(readings):
            chosen.append(readings[int(entry)])
            continue
        matches = [card for card in readings if entry.startswith("GPU-") and card.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return chosen


def _profile_of(reading: Reading) -> Gpu | None:
    """`NVIDIA A100-SXM4-80GB` → a100-80g: the model must be a word of the name, the memory within 5%."""
    words = re.split(r"[\s-]+", reading.name.lower().replace("rtx ", "rtx"))
    for profile in PROFILES:
        model = profile.name.partition("-")[0]
        near = abs(reading.usable_bytes - profile.capacity_bytes) < 0.05 * profile.capacity_bytes
        if model in words and near:
            return profile
    return None


def _read_nvml() -> list[Reading]:
    try:
        import pynvml
    except ImportError:
        raise BadInput(_problem("the package nvidia-ml-py is not installed")) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise BadInput(_problem(f"NVML does not answer here ({error})")) from None
    try:
        return [_read_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise BadInput(_problem(f"NVML failed ({error})")) from None
    finally:
        pynvml.nvmlShutdown()


def _read_card(pynvml, index: int) -> Reading:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    # Version 2 keeps the driver's own reserve apart from what processes use; version 1 counts it as used.
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Reading(_text(name), _text(uuid), memory.total - memory.reserved, memory.used, tuple(capability))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # nvidia-ml-py before 12 gives bytes


def _problem(wrong: str) -> Problem:
    return Problem("command line", "--gpu auto", wrong, "Name the card instead, such as --gpu a100-80g or --gpu 64GiB")
