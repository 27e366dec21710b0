"""Causal attention over a shared row: two calls of the attention the model uses anyway, without a T x T mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpofit.train.longdpo.shared_row import SharedRow

Attention = Callable[..., tuple[Tensor, Any]]
IMPLEMENTATIONS = ("sdpa", "flash_attention_2")


def in_two_calls(stock: Attention, second: Attention) -> Attention:
    """`stock`, an attention function of transformers, unless called with a `shared_prompt`.

    Then prompt and chosen answer attend as ever, and the rejected answer's queries attend to the prompt's and their own
    keys by `second`, whose causal mask must be aligned to the lower right.
    """

    @functools.wraps(stock)
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        row: SharedRow | None = kwargs.pop("shared_prompt", None)
        if row is None:
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        kwargs.pop("position_ids", None)  # flash attention takes restarting positions for packed sequences
        parts = [row.prompt, row.chosen, row.rejected]
        queries = query.split([row.first, row.rejected], dim=2)
        firsts = [states.narrow(2, 0, row.first) for states in (key, value)]
        seconds = []
        for states in (key, value):
            prompt, _, rejected = states.split(parts, dim=2)
            seconds.append(torch.cat([prompt, rejected], dim=2))
        chosen, _ = stock(module, queries[0], *firsts, None, *args, **kwargs)
        rejected, _ = second(module, queries[1], *seconds, None, *args, **kwargs)
        return torch.cat([chosen, rejected], dim=1), None

    return attention


def lower_right_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the last `queries` of `keys` tokens: [1, heads, queries, d] over [1, kv_heads, keys, d].

    On CUDA torch runs its flash kernel, whose causal mask is lower right, or its memory-efficient one with that mask
    type (torch 2.13 nn/attention/bias.py 175-245); elsewhere a bool mask of queries x keys is made.
    """
    from transformers.integrations.sdpa_attention import repeat_kv

    device = query.device.type
    if torch.is_autocast_enabled(device):  # which F.scaled_dot_product_attention does itself only for a plain mask
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (states.to(dtype) for states in (query, key, value))
    mask, grouped = _lower_right_mask(query, key, value, dropout)
    if not grouped:
        key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def _lower_right_mask(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> tuple[Any, bool]:
    """The mask, and whether what will run reads grouped keys and values in place: of torch's, only the flash kernel."""
    queries, keys = query.shape[2], key.shape[2]
    if not query.is_cuda:
        return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries), False
    from torch.backends.cuda import SDPAParams, can_use_flash_attention
    from torch.nn.attention.bias import causal_lower_right

    grouped = can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, True))
    return causal_lower_right(queries, keys), grouped
