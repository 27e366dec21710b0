"""What older transformers did differently with memory, put over the installed one: losses, masks, repeated heads."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch


def patches(version: tuple[int, int], stack: ExitStack) -> list[str]:
    """Enter the differences of `version` below 5 into `stack`; what they are, for people."""
    from transformers.integrations import sdpa_attention
    from transformers.loss.loss_utils import LOSS_MAPPING
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    done = ["the causal loss of transformers 4.x, which shifts the logits"]
    stack.enter_context(mock.patch.dict(LOSS_MAPPING, {"ForCausalLM": _causal_loss}))
    if version < (4, 46):
        done.append("logits upcast by the model, as before transformers 4.46")
    if version < (4, 53):
        masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        stack.enter_context(mock.patch.dict(masks, {"sdpa": _additive(masks["sdpa"])}))
        stack.enter_context(mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False))
        done.append("an additive mask made once, and repeated key heads, as before transformers 4.53")
    return done


def fp32_logits(model: torch.nn.Module) -> None:
    """transformers 4.45 modeling_qwen2.py: `logits = self.lm_head(...)`, `logits.float()`; dropped in 4.46."""
    model.lm_head.register_forward_hook(lambda module, args, output: output.float())  # type: ignore[union-attr, operator]


def _causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers 4.48 loss/loss_utils.py ForCausalLMLoss: it shifts the logits, where 5.x shifts the labels."""
    from transformers.loss.loss_utils import fixed_cross_entropy

    logits = logits.float()
    shift_logits = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    shift_labels = labels[..., 1:].contiguous().view(-1)
    return fixed_cross_entropy(shift_logits, shift_labels, num_items_in_batch, ignore_index)


def _additive(make: Any) -> Any:
    """transformers 4.45 _update_causal_mask: the mask in the model's dtype, minus infinity where nothing may look."""

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        allowed = make(*args, **kwargs)
        if allowed is None:
            return None
        out = torch.zeros(allowed.shape, dtype=torch.bfloat16, device=allowed.device)
        return out.masked_fill_(~allowed, torch.finfo(torch.bfloat16).min)

    return mask
