"""The cards known by name: what torch reports as their memory, their context, their data-sheet speeds.

Capacity is the lowest figure found for the card, because newer drivers keep more for themselves. Marks:
`printed` = torch printed it in a public log that is named; `reported` = seen in public out-of-memory messages
that nobody archived; `derived` = from another card, as said. Speeds are NVIDIA's data sheets: dense tensor-core
peak with fp32 accumulation, and PCIe x16 of the card's generation in one direction after 128b/130b coding. Compute
capabilities are those of NVIDIA's list of CUDA GPUs (developer.nvidia.com/cuda-gpus); A800, H20 and L20 are the chips
of A100, H100 and L40S.
"""

from __future__ import annotations

from dpofit.hardware.cluster import Gpu
from dpofit.units import GIB, MIB

_GEN3, _GEN4, _GEN5 = 15.75, 31.5, 63.0

# CUDA context and kernels, before any tensor and any communicator. Read on an A100 with torch 2.1.1
# (stas00/ml-engineering 744d01e training/performance/README.md): 0.47 GiB with one kernel loaded, 0.92 GiB with
# all of torch's; training lies between, and the upper reading is used. A B200 running elementwise kernels
# printed 0.70 GiB (its debug/pytorch.md: 168.34 in use - 167.64 allocated), inside that range.
_A100_CONTEXT = round(0.92 * GIB)
# LlamaFactory#1936, a card of 23.65 GiB: 21.98 in use - 21.51 allocated = 0.47 GiB; a bare context there 398 MiB.
_AD102_CONTEXT = round(0.47 * GIB)
_T4_CONTEXT = round(0.14 * GIB)  # a bare context read on a T4

_MEASURED = "context 0.92 GiB: measured (all torch kernels loaded, 0.47 with one)"
_AS_A100 = "context 0.92 GiB: assumed as on A100"
_AS_24GB = "context 0.47 GiB: assumed as on a 23.65 GiB card (LlamaFactory#1936)"


def _card(
    name: str,
    capacity_gib: float,
    source: str,
    context: tuple[int, str],
    tflops: float,
    pcie: float,
    compute_capability: tuple[int, int],
) -> Gpu:
    context_bytes, context_source = context
    capacity_bytes = round(capacity_gib * GIB) // MIB * MIB
    return Gpu(name, capacity_bytes, f"{source}; {context_source}", context_bytes, tflops, pcie, compute_capability)


_A100 = (_A100_CONTEXT, _MEASURED)
_LIKE_A100 = (_A100_CONTEXT, _AS_A100)
_LIKE_24GB = (_AD102_CONTEXT, _AS_24GB)

PROFILES: tuple[Gpu, ...] = (
    _card("a100-40g", 39.39, "reported 39.39 to 39.59 GiB; unslothai/notebooks bdda2ef print 39.49 and 39.56",
          _A100, 312, _GEN4, (8, 0)),
    _card("a100-80g", 79.15, "printed: litgpt 0270268 tutorials/oom.md; unslothai/notebooks bdda2ef print 79.25, 79.32",
          _A100, 312, _GEN4, (8, 0)),
    _card("a800-80g", 79.15, "derived: the A100 80GB's chip and memory; reported 79.32 and 79.35 GiB",
          _LIKE_A100, 312, _GEN4, (8, 0)),
    _card("h100-80g", 79.10, "printed: stas00/ml-engineering 744d01e debug/pytorch.md; reported up to 79.65 GiB",
          _LIKE_A100, 989, _GEN5, (9, 0)),
    _card("h20-96g", 95.00, "reported 95.00 to 95.22 GiB; nvidia-smi's 97,871 MiB less the 0.6 GiB H200 keeps = 95.0",
          _LIKE_A100, 148, _GEN5, (9, 0)),
    _card("h200-141g", 139.80, "printed: stas00/ml-engineering 744d01e debug/pytorch.md",
          _LIKE_A100, 989, _GEN5, (9, 0)),
    _card("b200-180g", 178.35, "printed: stas00/ml-engineering 744d01e debug/pytorch.md",
          _LIKE_A100, 2250, _GEN5, (10, 0)),
    _card("l40s-48g", 44.39, "reported 44.39 to 44.53 GiB", _LIKE_24GB, 362, _GEN4, (8, 9)),
    _card("l20-48g", 44.39, "derived: the L40S's chip and ECC memory; reported 44.5 GiB",
          _LIKE_24GB, 119.5, _GEN4, (8, 9)),
    _card("a40-48g", 44.35, "reported 44.35 to 44.56 GiB", _LIKE_24GB, 149.7, _GEN4, (8, 6)),
    _card("a10-24g", 22.03, "reported 22.03 to 22.20 GiB; unslothai/notebooks bdda2ef print 22.18 for A10G",
          _LIKE_24GB, 125, _GEN4, (8, 6)),
    _card("rtx3090", 23.69, "reported 23.69 and 23.70 GiB", _LIKE_24GB, 71, _GEN4, (8, 6)),
    _card("rtx4090", 23.64, "reported 23.64 and 23.65 GiB", _LIKE_24GB, 165.2, _GEN4, (8, 9)),
    _card("rtx5090", 31.36, "reported 31.36 and 31.37 GiB", _LIKE_24GB, 209.5, _GEN5, (12, 0)),
    _card("v100-16g", 15.77, "reported 15.77 and 15.78 GiB; speed is fp16", _LIKE_24GB, 125, _GEN3, (7, 0)),
    _card("v100-32g", 31.74, "reported 31.74 and 31.75 GiB; speed is fp16", _LIKE_24GB, 125, _GEN3, (7, 0)),
    _card("t4-16g", 14.56, "printed: unslothai/notebooks bdda2ef print 14.563, 14.741, 14.748; speed is fp16",
          (_T4_CONTEXT, "context 0.14 GiB: measured, bare"), 65, _GEN3, (7, 5)),
)  # fmt: skip

UNKNOWN_CARD_CONTEXT = _A100_CONTEXT, _AS_A100
