"""Products of bf16 matrices in fp32, unrounded: parts of sums that stock computes in one piece and rounds once."""

from __future__ import annotations

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, fp32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)  # the accumulators of the same kernel, as they are
    return left.float() @ right.float()
