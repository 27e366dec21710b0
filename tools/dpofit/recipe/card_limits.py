"""What a recipe asks of a card that cards before Ampere can't do: bf16 and FlashAttention-2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dpofit.hardware.cluster import has_bf16


class Unable(NamedTuple):
    """`id` is one of kinds.KINDS; `key` of the recipe, what is wrong with it on this card, and what is right."""

    id: str
    key: str
    wrong: str
    right: str


def unable(
    card: str, compute_capability: tuple[int, int] | None, *, bf16: bool, pure_bf16: bool, attention: str
) -> Iterator[Unable]:
    """bf16 is no error on such cards: transformers 5.5.4 asks torch.cuda.is_bf16_supported(), which since torch 2.4
    says yes where bf16 tensors can be made at all. It is emulated, and scaled_dot_product_attention, whose efficient
    kernel takes bf16 from compute capability 8.0 on (ATen native/transformers/cuda/sdp_utils.cpp), falls back to one
    that keeps every score. flash-attn's kernels refuse the card in the first forward."""
    if has_bf16(compute_capability):
        return
    for key, on in (("bf16", bf16), ("pure_bf16", pure_bf16)):
        if on:
            right = f"Set fp16: true and {key}: false"
            yield Unable("config.bf16-hardware", key, f"is on, and {card} has no bf16", right)
    if attention in ("fa2", "fa3"):
        wrong = f"is {attention}, which does not run on {card} (before Ampere)"
        yield Unable("config.flash-attn-hardware", "flash_attn", wrong, "Set flash_attn: sdpa")
