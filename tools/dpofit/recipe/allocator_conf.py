"""PYTORCH_ALLOC_CONF as torch parses it: a setting it does not know ends every rank at its first CUDA call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dpofit.recipe.issue import Issue

# torch reads PYTORCH_ALLOC_CONF first, the older name after it (c10/core/AllocatorConfig.cpp); some releases read
# only the older one (pytorch#183387).
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# torch 2.13 c10/core/AllocatorConfig.h (parse*) and c10/cuda/CUDAAllocatorConfig.h:158 (getKeys), without ROCm's.
KEYS = frozenset({
    "backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "large_segment_size_mb", "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction",
    "pinned_free_catch_all", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "release_lock_on_cudamalloc", "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
})  # fmt: skip


def allocator_issues(environment: Mapping[str, str]) -> Iterator[Issue]:
    """Every setting that torch 2.13 would refuse, under either name."""
    for name in ALLOCATOR_VARIABLES:
        for setting in _settings(environment.get(name, "")):
            key, colon, value = (part.strip() for part in setting.partition(":"))
            if not colon or key not in KEYS:
                right = f"torch 2.13 knows {', '.join(sorted(KEYS))}."
                yield Issue("config.allocator-setting", "environment", name, f"says {setting.strip()!r}", right)
            elif key == "expandable_segments" and value not in ("True", "False"):
                right = "Write expandable_segments:True or expandable_segments:False, with a capital."
                yield Issue("config.allocator-setting", "environment", name, f"says {setting.strip()!r}", right)


def _settings(text: str) -> list[str]:
    """`a:1,b:[256:1,512:2]` → its settings; commas inside brackets belong to a value."""
    return [setting for setting in re.split(r",(?![^\[]*\])", text) if setting.strip()]
