"""How large a block of page-locked host memory torch really takes for a request."""

from __future__ import annotations


def pinned_block_bytes(size_bytes: int, round_threshold_bytes: int | None = None) -> int:
    """Bytes of the block that torch's CachingHostAllocator takes for `size_bytes`: the next power of two.

    No smaller size is raised to a minimum, 0 takes nothing, and a cached block is never split, so what is
    above the request is lost until the block is freed, and the block is reused only for requests that round
    to the same size. `round_threshold_bytes` is `pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF
    (torch 2.13): larger requests are then taken as they are.
    Source: torch 2.13 ATen/core/CachingHostAllocator.h, CachingHostAllocatorImpl::allocate, `roundSize`.
    """
    if size_bytes <= 0:
        return 0
    if round_threshold_bytes is not None and size_bytes > round_threshold_bytes:
        return size_bytes
    return 1 << (size_bytes - 1).bit_length()
