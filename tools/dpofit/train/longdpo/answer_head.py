"""A language model's head that gives the log-probs of labels instead of logits, in chunks, recomputed in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpofit.train import longdpo
from dpofit.train.longdpo import wide


class AnswerHead(nn.Linear):
    """`nn.Linear`, unless called with targets. One module call a pass, so ZeRO-3 gathers the weight once."""

    # `input`, as nn.Linear calls it; DeepSpeed and PEFT pass it on by position.
    def forward(self, input: Tensor, targets: Tensor | None = None, sums: Tensor | None = None) -> Any:
        """With `targets` [n]: `input` is [n, hidden], the states that predict them, and `sums` [rows, hidden] the
        fp32 sum of all states of each row. Gives the targets' log-probs, [n] fp32, and the sum of all logits of each
        row, [rows] fp32, without gradient (logits are linear in the state, so no logit need exist for their sum)."""
        if targets is None:
            return super().forward(input)
        device = input.device.type
        # What F.linear does under autocast; custom functions see none of it.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        logps = _TargetLogps.apply(input.to(dtype), self.weight.to(dtype), targets)
        with torch.no_grad():
            logit_sums = None if sums is None else (sums * self.weight.sum(0, dtype=torch.float32)).sum(-1)
        return logps, logit_sums


def answer_head(head: Any) -> AnswerHead:
    """The layer to call with targets: `head`, or of a head in PEFT's `modules_to_save` the copy that is in use.

    Not PEFT's wrapper itself: ZeRO-3 hooks it with the functions of the layer inside, and fails on its first call
    (deepspeed 0.18.4 zero/parameter_offload.py 391 asks `hasattr`, which the wrapper answers for that layer).
    Raises TypeError for a head that is no plain linear layer (quantized, with a bias, or with LoRA of its own).
    """
    if hasattr(head, "modules_to_save"):
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    if type(head) is nn.Linear and head.bias is None:
        head.__class__ = AnswerHead
    if not isinstance(head, AnswerHead):
        raise TypeError(f"answer_logps needs a plain linear head, not {type(head).__name__}: turn it off.")
    return head


class _TargetLogps(torch.autograd.Function):
    """log softmax(hidden @ weight.T)[target], row by row, with the dtypes of stock: the product in the model's
    dtype, the softmax in fp32 (llamafactory 0.9.5 train/dpo/trainer.py 206-209, train/trainer_utils.py 610-616)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Chunks of positions. Keeps the arguments and one fp32 number a position."""
        logps = hidden.new_empty(targets.shape, dtype=torch.float32)
        log_sums = torch.empty_like(logps)
        for start in range(0, len(targets), longdpo.CHUNK_POSITIONS):
            rows = slice(start, start + longdpo.CHUNK_POSITIONS)
            logps[rows], log_sums[rows] = _score(hidden[rows], weight, targets[rows])
        # The parameter itself, not a view: ZeRO-3 frees its data now and gathers it again before backward.
        ctx.save_for_backward(hidden, weight, targets, log_sums)
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Slices of the vocabulary, all positions at once: each row of the weight's gradient is one product, rounded
        once, as in stock, and needs no fp32 accumulator as large as the weight."""
        hidden, weight, targets, log_sums = ctx.saved_tensors
        for_hidden, for_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        vocabulary = len(weight)
        width = max(1, min(vocabulary, longdpo.CHUNK_POSITIONS * vocabulary // max(1, len(targets))))
        for start in range(0, vocabulary, width):
            tokens = slice(start, min(start + width, vocabulary))
            part = weight[tokens]
            slope = _slope(hidden, part, targets - start, log_sums, grad)
            if grad_hidden is not None:
                grad_hidden += wide.product(slope, part)
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[tokens])
            del slope  # before the next slice's logits
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None


def _score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and the log of the sum of all exponentiated logits; both [n] fp32."""
    logits = F.linear(hidden, weight).float()
    logps = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return logps, logits.gather(1, targets[:, None])[:, 0] - logps


def _slope(hidden: Tensor, part: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor) -> Tensor:
    """Gradient of one slice's logits [n, slice], in the model's dtype; `targets` count from the slice's first token."""
    logits = F.linear(hidden, part).float()
    # d logp / d logit = [token is the target] - probability
    slope = logits.sub_(log_sums[:, None]).exp_().mul_(-grad[:, None])
    inside = (targets >= 0) & (targets < len(part))
    slope.scatter_add_(1, targets.clamp(0, len(part) - 1)[:, None], torch.where(inside, grad, 0)[:, None])
    return slope.to(hidden.dtype)
