"""What flash-attn's two functions compute, written out in plain torch, to stand in for its CUDA kernels.

Arguments and meaning of flash-attn 2.8.3 (flash_attn/flash_attn_interface.py and its docstrings): tensors are
[batch, tokens, heads, d], or [all tokens, heads, d] for the variable-length one; groups of query heads share one;
causal masks are "aligned to the bottom right corner of the attention matrix"; a row that sees nothing is zero. Anything
but causal attention is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpofit.train import hooks
from dpofit.train.hooks import Hook

OWNER = "flash-test"


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal, lower right: [queries, heads, d] over [keys, kv_heads, d]."""
    k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * (q.shape[2] ** -0.5 if scale is None else scale)
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    _only_causal(dropout_p, causal, window_size, softcap)
    return torch.stack([attend(*one, softmax_scale) for one in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: None = None,
) -> Tensor:  # fmt: skip
    _only_causal(dropout_p, causal, window_size, softcap)
    of_q, of_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(of_q), max(of_k)) == (max_seqlen_q, max_seqlen_k)
    parts = zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True)
    return torch.cat([attend(*part, softmax_scale) for part in parts])


def _only_causal(dropout_p: float, causal: bool, window_size: tuple[int, int], softcap: float) -> None:
    assert (dropout_p, causal, window_size, softcap) == (0.0, True, (-1, -1), 0.0)


@contextmanager
def in_place_of_the_kernels() -> Iterator[list[tuple[str, int, int]]]:
    """transformers' own flash code calls these; gives the calls made: which, and how many queries and keys."""
    calls: list[tuple[str, int, int]] = []

    def noted(function: Callable[..., Tensor], tokens: int) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            calls.append((function.__name__, q.shape[tokens], k.shape[tokens]))
            return function(q, k, *args, **kwargs)

        return call

    def lazy_import(stock: Any) -> Any:
        from transformers.modeling_flash_attention_utils import _lazy_define_process_function, _pad_input, _unpad_input

        functions = (noted(flash_attn_func, 1), noted(flash_attn_varlen_func, 0), None, _pad_input, _unpad_input)
        supported = _lazy_define_process_function(flash_attn_varlen_func)
        return lambda *args, **kwargs: (functions, supported)

    def use_flash(stock: Any) -> Any:
        """LLaMA-Factory asks for the package before it sets this (model/model_utils/attention.py)."""

        def init_adapter(*args: Any, **kwargs: Any) -> Any:
            model = stock(*args, **kwargs)
            model.config._attn_implementation = "flash_attention_2"
            return model

        return init_adapter

    module = "transformers.modeling_flash_attention_utils"
    hooks.install(
        [
            Hook(OWNER, f"{module}:lazy_import_flash_attention", lazy_import),
            Hook(OWNER, "llamafactory.model.loader:init_adapter", use_flash),
        ]
    )
    try:
        yield calls
    finally:
        hooks.uninstall(OWNER)
