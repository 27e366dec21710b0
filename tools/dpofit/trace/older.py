"""What older transformers did differently with memory, put over the installed one: losses, masks, repeated heads."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch


def patches(version: tuple[int, int], stack: ExitStack) -> list[str]:
    """Enter the differences of `version` below 5 into `stack`; what they are, for people."""
    from transformers.integrations import sdpa_attention
    from transformers.loss.loss_utils import LOSS_MAPPING
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    done = []
    if version < (4, 49):
        stack.enter_context(mock.patch.dict(LOSS_MAPPING, {"ForCausalLM": _causal_loss}))
        done.append("the causal loss that shifts the logits, as before transformers 4.49")
    if version < (4, 46):
        done.append("logits upcast by the model, as before transformers 4.46")
    if version < (4, 53):
        masks = {"sdpa": partial(_additive, unless_all=True), "eager": partial(_additive, unless_all=False)}
        stack.enter_context(mock.patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, masks))
        stack.enter_context(mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False))
        kernel = partial(_contiguous, torch.nn.functional.scaled_dot_product_attention, version)
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", kernel))
        done.append("an additive mask made once, repeated key heads, a contiguous query, as before transformers 4.53")
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


def _additive(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    unless_all: bool,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """transformers 4.45 modeling_qwen2.py:98-117, 1030-1079 (4.48: 580-700): the mask in the embeddings' dtype, its
    lowest number where nothing may look; SDPA's (`unless_all`) is none where nothing is padded, and lets rows that see
    nothing see everything (modeling_attn_mask_utils.py _unmask_unattended)."""
    if unless_all and (attention_mask is None or attention_mask.all()):
        return None
    lowest = torch.finfo(dtype).min
    causal = torch.full((q_length, kv_length), lowest, dtype=dtype, device=device)
    causal = torch.triu(causal, diagonal=1)
    causal *= torch.arange(kv_length, device=device) > torch.arange(q_length, device=device).reshape(-1, 1)
    causal = causal[None, None, :, :].expand(batch_size, 1, -1, -1)
    if attention_mask is not None:
        causal = causal.clone()
        padding = causal + attention_mask[:, None, None, :]
        padding = padding == 0
        causal[:, :, :, :] = causal.masked_fill(padding, lowest)
        del padding  # the function that made the mask has returned
    return causal.mul(~torch.all(causal == lowest, dim=-1, keepdim=True)) if unless_all else causal


def _contiguous(
    kernel: Any,
    version: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """transformers 4.45 modeling_qwen2.py:613-616: contiguous beside a mask; 4.48 integrations/sdpa_attention.py:40-42:
    always."""
    if attn_mask is not None or version >= (4, 48):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    return kernel(query, key, value, attn_mask=attn_mask, **options)  # type: ignore[no-any-return]
