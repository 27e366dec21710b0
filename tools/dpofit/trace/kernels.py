"""CUDA semantics on fake CPU tensors: attention kernels, workspaces, and operations that behave differently there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_INNER = torch.float32.itemsize


# --- attention ------------------------------------------------------------------------------------------------


# Stands for torch.nn.attention.bias.causal_lower_right(...), for which its _dispatch takes the flash kernel.
LOWER_RIGHT: Any = object()


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` as torch 2.13 dispatches it on CUDA for bf16 (ATen transformers/attention.cpp):
    without a mask the flash kernel, which takes grouped keys as they are; with a mask the memory-efficient kernel, for
    which a bool mask becomes a bf16 bias of the mask's own shape, padded to a multiple of 16."""
    if query.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask is not LOWER_RIGHT and attn_mask.dtype == torch.float32:
        attn_mask = attn_mask.to(query.dtype)  # autocast's, like the others; only older transformers make such masks
    if attn_mask is LOWER_RIGHT:
        attn_mask, is_causal = None, True
    if attn_mask is None:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return out[0]
    bias = attn_mask
    if bias.dtype == torch.bool:
        bias = aten.where(bias, query.new_zeros(()), query.new_full((), float("-inf")))
    if bias.shape[-1] % 16:
        pad = 16 - bias.shape[-1] % 16
        bias = torch.nn.functional.pad(bias, (0, pad))[..., :-pad]
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled() and query.requires_grad, dropout_p, is_causal, scale=scale
    )
    return out[0]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """flash-attn 2's `[B, T, H, D]` entry: the same kernel as torch's flash path, so the same saved tensors."""
    out = aten._scaled_dot_product_flash_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p, causal, False, scale=softmax_scale
    )
    return out[0].transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    """flash-attn 2's unpadded `[tokens, H, D]` entry; represented as one row, which saves the same bytes."""
    return flash_attn_func(q[None], k[None], v[None], dropout_p, softmax_scale, causal)[0]


# --- workspaces: what a CUDA kernel allocates and frees inside one operation -------------------------------------


def _softmax_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """ATen cuda/SoftMax.cu host_softmax: `input_.contiguous()`; the CPU kernel does the same, which a test measures."""
    tensor = args[0]
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _softmax_backward_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sum(0 if t.is_contiguous() else t.numel() * t.element_size() for t in args[:2])


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """flash-attn 2 flash_api.cpp mha_bwd: fp32 dq accumulator [B, T128, H, D_rounded], fp32 softmax_d [B, H, T128];
    with grouped keys bf16 dk, dv per query head, reduced to the groups after."""
    query, key = args[1], args[2]
    batch, heads, tokens, dim = query.shape
    rounded_tokens = -(-tokens // 128) * 128
    rounded_dim = -(-dim // 32) * 32 if dim <= 128 else -(-dim // 64) * 64
    total = batch * rounded_tokens * heads * rounded_dim * _INNER + batch * heads * rounded_tokens * _INNER
    if key.shape[1] != heads:
        total += 2 * batch * key.shape[2] * heads * dim * query.element_size()
    return total


def _efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """torch 2.13 cuda/attention_backward.cu: `delta` fp32 [B, H, T32]; for bf16 outputs of more than one key block the
    kernel needs fp32 accumulators for dq (AttentionBackwardKernel::workspace_size)."""
    query = args[1]
    batch, heads, tokens, dim = query.shape
    delta = batch * heads * (-(-tokens // 32) * 32) * _INNER
    accumulator = batch * heads * tokens * dim * _INNER
    return delta + accumulator


def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """ATen cuda/Embedding.cu: above 3,072 indices, or with a padding index, indices are sorted (two int64 copies and
    their permutation) and one fp32 row a partial segment is kept; at most one segment a token."""
    gradient, indices, padding_idx = args[0], args[1], args[3]
    tokens = indices.numel()
    if tokens <= 3072 and padding_idx < 0:
        return 0
    return tokens * (4 * 8 + gradient.shape[-1] * _INNER)


Workspaces = dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], int]]

CPU_WORKSPACE: Workspaces = {  # ATen SoftMax.cpp asks for contiguous tensors too
    aten._log_softmax.default: _softmax_copy,
    aten._softmax.default: _softmax_copy,
    aten._log_softmax_backward_data.default: _softmax_backward_copy,
    aten._softmax_backward_data.default: _softmax_backward_copy,
}
CUDA_WORKSPACE: Workspaces = CPU_WORKSPACE | {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}


# --- the engine's in-place accumulation -------------------------------------------------------------------------

_CALLER = "_engine_run_backward"  # torch/autograd/graph.py: the frame under which the engine runs C++ backward nodes
_SOLE_OWNER = (4, 2)  # (_use_count, storage use count) of a fake tensor only the engine's buffer holds, at dispatch


def _solely_owned(tensor: torch.Tensor) -> bool:
    counts = tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return counts == _SOLE_OWNER


def _called_by_engine() -> bool:
    """Whether no Python code stands between the engine and this operation."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == _CALLER:
            return True
        if "/dpofit/trace/" not in path and not path.endswith(("_dynamo/eval_frame.py", "torch/_compile.py")):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


def accumulate_in_place(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The engine adds a second gradient into the first, or the first into the second, when it's the last to hold it
    (torch 2.13 autograd/input_buffer.cpp can_accumulate_inplace); for tensor subclasses it never does.
    A view isn't: it keeps its base."""
    if func is not aten.add.Tensor or torch.is_grad_enabled() or not _called_by_engine():
        return None
    old, new = args[0], args[1]
    if not isinstance(new, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
        return None
    if _solely_owned(old):  # a fake tensor's sum is itself
        return old
    return new if _solely_owned(new) else None
