"""Linear layers whose weights' gradients are added up part by part without being rounded in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpofit.train.longdpo import wide

Add = Callable[[int, Tensor], None]  # takes a parameter's place and a part of its gradient, fp32


@contextmanager
def unrounded_linears(trainable: Sequence[torch.nn.Parameter], add: Add) -> Iterator[None]:
    """Inside, F.linear (DeepSpeed's, where that is in its place) hands the gradients of those of `trainable` that are
    narrower than fp32 to `add`, and autograd none. Not under autocast: it rounds its fp32 weights' gradients to bf16
    on the way, of which a sum of rounded parts is no further off."""
    places = {id(one): place for place, one in enumerate(trainable) if one.dtype in (torch.bfloat16, torch.float16)}
    stock = F.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) not in places or torch.is_autocast_enabled(input.device.type):
            return stock(input, weight, bias)
        result: Tensor = _Linear.apply(input, weight, bias, places[id(weight)], places.get(id(bias)), add)
        return result

    F.linear = linear
    try:
        yield
    finally:
        F.linear = stock


class _Linear(torch.autograd.Function):
    """F.linear, whose weight and bias get their gradients from outside autograd."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, place: int, bias_place: int | None, add: Add
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.place, ctx.bias_place, ctx.add = place, bias_place, add
        return torch._C._nn.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        (grad,) = grads
        grad_input = grad @ weight if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        ctx.add(ctx.place, wide.product(rows.t(), input.flatten(0, -2)))
        if ctx.bias_place is not None:
            ctx.add(ctx.bias_place, rows.sum(0, dtype=torch.float32))
        return grad_input, None, None, None, None, None
