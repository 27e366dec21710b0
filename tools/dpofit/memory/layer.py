"""One decoder layer on the tape, in the order of transformers' Qwen2/Qwen3/Llama decoder layers (5.5.4)."""

from __future__ import annotations

from dataclasses import replace

from dpofit.memory.attention import AttentionOps
from dpofit.memory.ops import Ops
from dpofit.memory.spec import LayerSpec
from dpofit.memory.tape import Storage, Tape, Value
from dpofit.memory.tiled import tiled_mlp


def decoder_layer(spec: LayerSpec, tape: Tape, x: Value, mask: Storage | None) -> Value:
    """Write one layer's forward; the caller still holds `x`. Returns the output, held."""
    ops, attention, model = Ops(spec, tape), AttentionOps(spec, tape), spec.model
    tape.mark("pre", "layer")
    normed = ops.rms_norm(x, "input_layernorm", model.hidden_size, spec.tokens)
    tape.mark("pre", "self_attn")
    if model.model_type == "qwen":  # Qwen 1: one fused projection, and two modules called c_proj
        c_attn, o_proj, up, gate, down = model.linears
        down = replace(down, name="mlp.c_proj")
        q, k, v = _split_fused(tape, ops.linear(normed, c_attn))
    elif model.model_type == "phi3":
        qkv_proj, o_proj, gate_up, down = model.linears
        q, k, v = _slices(tape, ops.linear(normed, qkv_proj))
    else:
        q_proj, k_proj, v_proj, o_proj, gate, up, down = model.linears
        q = ops.linear(normed, q_proj)
        if model.qk_norm:
            q = _rebind(tape, q, ops.rms_norm(q, "q_norm", model.head_dim, spec.tokens * model.heads))
        k = ops.linear(normed, k_proj)
        if model.qk_norm:
            k = _rebind(tape, k, ops.rms_norm(k, "k_norm", model.head_dim, spec.tokens * model.kv_heads))
        v = ops.linear(normed, v_proj)
    q, k = attention.rope(q, k)
    states = [tape.hold(value.storage) for value in (q, k, v)]  # names of self_attn's forward, until it returns
    attended = attention.attention(q, k, v, mask)
    output = ops.linear(attended, o_proj)
    tape.drop(attended.storage, *states)
    output = ops.boundary(output, "self_attn")
    tape.drop(normed.storage)  # hidden_states is rebound when self_attn returns
    middle = ops.residual(x, output, "residual.attention")
    tape.drop(output.storage)
    normed = ops.rms_norm(middle, "post_attention_layernorm", model.hidden_size, spec.tokens)
    tape.mark("pre", "mlp")
    if model.model_type == "phi3":
        computed = ops.fused_gated_mlp(normed, gate_up, down)
    elif spec.tiled:
        computed = tiled_mlp(spec, tape, normed, gate, up, down)
    else:
        computed = ops.gated_mlp(normed, gate, up, down)
    mlp = ops.boundary(computed, "mlp")
    tape.drop(normed.storage)
    result = ops.residual(middle, mlp, "residual.mlp")
    tape.drop(middle.storage, mlp.storage)
    return ops.boundary(result, "layer")


def _rebind(tape: Tape, old: Value, new: Value) -> Value:
    tape.drop(old.storage)
    return new


def _slices(tape: Tape, fused: Value) -> tuple[Value, Value, Value]:
    """Phi-3's q, k, v, slices of one projection: each slice's backward is a whole tensor, zero elsewhere."""
    parts = tuple(Value(tape.hold(fused.storage), fused.needs_grad) for _ in range(3))
    tape.drop(fused.storage)

    def backward(grad: Storage) -> None:
        tape.give(fused, tape.new("qkv.grad_slice", fused.storage.size_bytes, "activation_grads"))

    for part in parts:
        tape.node(part, [], backward)
    return parts[0], parts[1], parts[2]


def _split_fused(tape: Tape, fused: Value) -> tuple[Value, Value, Value]:
    """q, k, v as views of one projection: one storage, three holders; backward concatenates their gradients."""
    parts = tuple(Value(tape.hold(fused.storage), fused.needs_grad) for _ in range(3))
    tape.drop(fused.storage)
    size_bytes, waiting = fused.storage.size_bytes, len(parts)

    def backward(grad: Storage) -> None:
        nonlocal waiting
        waiting -= 1
        if waiting == 0:
            tape.give(fused, tape.new("c_attn.grad_cat", size_bytes, "activation_grads"))

    for part in parts:
        tape.node(part, [], backward)
    return parts[0], parts[1], parts[2]
