"""unsloth's layers on a traced model: its autograd functions by what they keep, allocate and write in place.

The package needs a GPU and replaces much of transformers when it is imported, so what stands here is written after
unsloth 2026.10.9, line by line; benchmarks/unsloth_functions.py runs the originals and compares. The Triton kernels
launch nothing: what they read and write was allocated by their callers. Layers are not compiled (UNSLOTH_BLOCK_COMPILE
=0), and attention is torch's: xformers 0.0.35 is built for torch 2.10.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

SUBSTITUTION = "unsloth: its functions by what they keep and write in place, Triton kernels launch nothing"
_forward = torch.amp.custom_fwd(device_type="cpu")
_backward = torch.amp.custom_bwd(device_type="cpu")


class RMSNorm(torch.autograd.Function):
    """kernels/rms_layernorm.py:950-1016, with reuse_grad."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(flat, weight, flat.new_empty(flat.shape[0], dtype=torch.float32))
        return torch.empty_like(flat).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.reshape(-1, grad.shape[-1]).contiguous().view(grad.shape), None


class Rope(torch.autograd.Function):
    """kernels/rope_embedding.py:349-375: in place where a projection's output is whole, which here it is."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.tables = cos.squeeze(), sin.squeeze()
        assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()
        return q.view(q.shape), k.view(k.shape)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        return _rows_first(dq), _rows_first(dk), None, None


def _rows_first(like: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, width = like.shape
    return torch.empty((batch, tokens, heads, width), dtype=like.dtype, device=like.device).transpose(1, 2)


def matmul_lora(x: torch.Tensor, weight: torch.Tensor, a: Any, b: Any, scale: Any) -> torch.Tensor:
    """kernels/utils.py:1855-1900, of a base that isn't quantized."""
    rows = x.view(-1, x.shape[-1])
    out = torch.matmul(rows, weight.t())
    if a is not None:
        a, b = a.t(), b.t()
        low = torch.matmul(rows, a.to(x.dtype))
        out.addmm_(low, b.to(x.dtype), alpha=scale)
    return out.view(*x.shape[:-1], -1)


def _adapter_gradients(
    x: torch.Tensor, a: torch.Tensor, low_grad: torch.Tensor, grad: torch.Tensor, into: Any, scale: float
) -> None:
    """fast_lora.py: d_A = X.t() @ (dY @ B.t()), d_B = (A.t() @ X.t()) @ dY."""
    into[0].addmm_(x.t(), low_grad, alpha=scale, beta=0)
    into[1].addmm_(a.t() @ x.t(), grad, alpha=scale, beta=0)


class LoraW(torch.autograd.Function):
    """kernels/fast_lora.py:1019-1112, LoRA_W."""

    @staticmethod
    @_forward
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: Any, b: Any, scale: Any) -> torch.Tensor:
        out = matmul_lora(x, weight, a, b, scale)
        ctx.weight, ctx.scale = weight, scale
        ctx.save_for_backward(a, b, x)
        return out

    @staticmethod
    @_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        a, b, x = ctx.saved_tensors
        shape = x.shape
        grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, shape[-1])
        a, b = a.to(x.dtype).t(), b.to(x.dtype).t()
        into = torch.empty_like(a), torch.empty_like(b)
        low_grad = grad @ b.t()
        _adapter_gradients(x, a, low_grad, grad, into, ctx.scale)
        x_grad = grad @ ctx.weight
        x_grad.addmm_(low_grad, a.t(), alpha=ctx.scale)
        return x_grad.view(shape), None, into[0].t(), into[1].t(), None


class LoraQKV(torch.autograd.Function):
    """kernels/fast_lora.py:747-971, LoRA_QKV: the input's gradient is written over the input."""

    @staticmethod
    @_forward
    def forward(ctx: Any, x: torch.Tensor, *projections: Any) -> tuple[torch.Tensor, ...]:
        ctx.projections = [projections[index : index + 4] for index in (0, 4, 8)]
        out = tuple(matmul_lora(x, *one) for one in ctx.projections)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    @_backward
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        shape = x.shape
        x = x.view(-1, shape[-1])
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        adapters = [(a.to(x.dtype).t(), b.to(x.dtype).t()) for _, a, b, _ in ctx.projections]
        into = [(torch.empty_like(a), torch.empty_like(b)) for a, b in adapters]
        lows = [grad @ b.t() for grad, (_, b) in zip(flat, adapters, strict=True)]
        scales = [scale for *_, scale in ctx.projections]
        for grad, (a, _), gradients, low, scale in zip(flat, adapters, into, lows, scales, strict=True):
            _adapter_gradients(x, a, low, grad, gradients, scale)
        x_grad = torch.matmul(flat[0], ctx.projections[0][0], out=x)
        for index, (grad, (a, _), low) in enumerate(zip(flat, adapters, lows, strict=True)):
            if index:
                x_grad.addmm_(grad, ctx.projections[index][0])
            x_grad.addmm_(low, a.t(), alpha=scales[index])
        return x_grad.view(shape), *(one for da, db in into for one in (None, da.t(), db.t(), None))


class LoraMLP(torch.autograd.Function):
    """kernels/fast_lora.py:346-601, LoRA_MLP with swiglu.py's kernels, which write over what they are given."""

    @staticmethod
    @_forward
    def forward(ctx: Any, x: torch.Tensor, *projections: Any) -> torch.Tensor:
        gate, up, down = ctx.projections = [projections[index : index + 4] for index in (0, 4, 8)]
        e = matmul_lora(x, *gate)
        g = matmul_lora(x, *up)
        h = torch.empty_like(e)
        out = matmul_lora(h, *down)
        ctx.save_for_backward(x, e, g)
        return out

    @staticmethod
    @_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, e, g = ctx.saved_tensors
        shape = x.shape
        grad, x = grad.reshape(-1, shape[-1]), x.view(-1, shape[-1])
        e, g = e.view(-1, e.shape[-1]), g.view(-1, g.shape[-1])
        adapters = [(a.to(x.dtype).t(), b.to(x.dtype).t()) for _, a, b, _ in ctx.projections]
        (gate, _, _, gate_scale), (up, _, _, up_scale), (down, _, _, down_scale) = ctx.projections
        (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = adapters
        h = matmul_lora(grad, down.t(), down_b, down_a, down_scale)  # its gradient, and then itself
        into = [(torch.empty_like(a), torch.empty_like(b)) for a, b in adapters]
        _adapter_gradients(h, down_a, grad @ down_b.t(), grad, into[2], down_scale)
        up_low, gate_low = e @ up_b.t(), g @ gate_b.t()  # what stood in e and g are the gradients of up and gate
        _adapter_gradients(x, up_a, up_low, e, into[1], up_scale)
        _adapter_gradients(x, gate_a, gate_low, g, into[0], gate_scale)
        x_grad = torch.matmul(e, up, out=x)
        x_grad.addmm_(up_low, up_a.t(), alpha=up_scale)
        x_grad.addmm_(g, gate)
        x_grad.addmm_(gate_low, gate_a.t(), alpha=gate_scale)
        return x_grad.view(shape), *(one for da, db in into for one in (None, da.t(), db.t(), None))


def install(model: Any) -> None:
    """Give a LoRA model of LLaMA-Factory's, of the families llama and qwen2, unsloth's forwards."""
    inner = model.base_model.model.model
    inner.forward = MethodType(_model_forward, inner)
    for layer in inner.layers:
        layer.forward = MethodType(_layer_forward, layer)
        layer.self_attn.forward = MethodType(_attention_forward, layer.self_attn)
        layer.mlp.forward = MethodType(_mlp_forward, layer.mlp)
    for norm in [inner.norm, *(one for layer in inner.layers for one in _norms(layer))]:
        norm.forward = MethodType(lambda self, x: RMSNorm.apply(x, self.weight), norm)
    # unsloth_zoo training_utils.py:497-499: torch's checkpoint, reentrant as when nothing is said, over the one that
    # LLaMA-Factory has set and unsloth's own, which takes inputs to the host
    model._set_gradient_checkpointing()


def _norms(layer: Any) -> tuple[Any, Any]:
    return layer.input_layernorm, layer.post_attention_layernorm


def _model_forward(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
    """models/llama.py:1398-1704: in training a batch without labels has its padding's embeddings zeroed, and no mask
    where it stands on the right. Rotary tables as transformers makes them; unsloth keeps its own."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    inputs_embeds = self.embed_tokens(input_ids)
    mask = attention_mask.unsqueeze(-1).to(inputs_embeds.dtype)
    inputs_embeds = (inputs_embeds.detach() * mask).requires_grad_(inputs_embeds.requires_grad)
    hidden_states = inputs_embeds  # both names stay, as there
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
    tables = self.rotary_emb(hidden_states, positions)
    for layer in self.layers:
        hidden_states = layer(hidden_states, position_embeddings=tables)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


def _layer_forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
    """models/llama.py:1163-1253."""
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states = self.self_attn(hidden_states, position_embeddings)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    return residual + hidden_states


def _attention_forward(self: Any, hidden_states: torch.Tensor, tables: Any) -> torch.Tensor:
    """models/llama.py:1063-1160, utils/attention_dispatch.py:1574-1650."""
    batch, tokens, _ = hidden_states.shape
    projections = self.q_proj, self.k_proj, self.v_proj
    if any(one.base_layer.bias is not None for one in projections):
        q, k, v = (one(hidden_states) for one in projections)
    else:
        q, k, v = LoraQKV.apply(hidden_states, *_parameters(*projections))
    q, k, v = (one.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for one in (q, k, v))
    q, k = Rope.apply(q, k, *tables)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    attended = attended.transpose(1, 2).reshape(batch, tokens, -1)
    return LoraW.apply(attended, *_parameters(self.o_proj))


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return LoraMLP.apply(x, *_parameters(self.gate_proj, self.up_proj, self.down_proj))


def _parameters(*projections: Any) -> list[Any]:
    """kernels/utils.py get_lora_parameters: weight, A, B, scale of each; no adapter where they are switched off."""
    found: list[Any] = []
    for one in projections:
        adapter = (None, None, None)
        if not one.disable_adapters:
            name = one.active_adapters[0]
            adapter = (one.lora_A[name].weight, one.lora_B[name].weight, one.scaling[name])
        found += [one.base_layer.weight, *adapter]
    return found
