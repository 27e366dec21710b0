"""One decoder layer on the tape, in the order of transformers' decoder layers (5.5.4): Llama's and the families'."""

from __future__ import annotations

from dataclasses import replace

from dpofit.memory.attention import AttentionOps
from dpofit.memory.ops import Ops
from dpofit.memory.spec import LayerSpec
from dpofit.memory.tape import Storage, Tape, Value
from dpofit.memory.tiled import tiled_mlp
from dpofit.memory.unsloth import FusedOps


def decoder_layer(spec: LayerSpec, tape: Tape, x: Value, mask: Storage | None) -> Value:
    """Write one layer's forward; the caller still holds `x`. Returns the output, held."""
    ops, model = Ops(spec, tape), spec.model
    tape.mark("pre", "layer")
    normed = ops.rms_norm(x, model.family.norms[0], model.hidden_size, spec.tokens)
    output, weights = _self_attention(spec, tape, normed, mask)
    tape.drop(normed.storage)  # hidden_states is rebound when self_attn returns
    middle = _joined(ops, x, output, "residual.attention", 1)
    normed = ops.rms_norm(
        middle, model.family.norms[-2 if model.family.norms_outputs else -1], model.hidden_size, spec.tokens
    )
    mlp = _mlp(spec, tape, normed)
    tape.drop(normed.storage)
    result = _joined(ops, middle, mlp, "residual.mlp", 3)
    tape.drop(middle.storage, weights)
    return ops.boundary(result, "layer")


def _joined(ops: Ops, x: Value, output: Value, tag: str, norm: int) -> Value:
    """x + output, or x + norm(output); lets go of `output`."""
    model = ops.spec.model
    if model.family.norms_outputs:
        output = _rebind(
            ops.tape, output, ops.rms_norm(output, model.family.norms[norm], model.hidden_size, ops.spec.tokens)
        )
    result = ops.residual(x, output, tag)
    ops.tape.drop(output.storage)
    return result


def _self_attention(spec: LayerSpec, tape: Tape, normed: Value, mask: Storage | None) -> tuple[Value, Storage | None]:
    """Attention between the marks of its module; the caller still holds `normed`. Also eager's weights, which the layer
    keeps under a name."""
    ops, attention, model = Ops(spec, tape), AttentionOps(spec, tape), spec.model
    tape.mark("pre", "self_attn")
    if spec.unsloth:
        q, k, v = FusedOps(spec, tape).qkv(normed)
    elif model.model_type == "qwen":  # Qwen 1: one fused projection, and two modules called c_proj
        q, k, v = _split_fused(tape, ops.linear(normed, model.linears[0]))
    elif model.family.fused_qkv:
        q, k, v = _slices(tape, ops.linear(normed, model.linears[0]))
    else:
        q, k, v = _projections(ops, normed)
    q, k = FusedOps(spec, tape).rope(q, k) if spec.unsloth else attention.rope(q, k)
    states = [tape.hold(value.storage) for value in (q, k, v)]  # names of self_attn's forward, until it returns
    attended = attention.attention(q, k, v, mask)
    if spec.unsloth:
        output = FusedOps(spec, tape).out(attended)
    else:
        output = ops.linear(attended, model.linears[1 if model.family.fused_qkv else 3])
    tape.drop(attended.storage, *states)
    return ops.boundary(output, "self_attn"), attention.returned_weights


def _projections(ops: Ops, normed: Value) -> tuple[Value, Value, Value]:
    """q, k and v; Qwen 3 norms q and k as it makes them, Gemma 3 when it has all three."""
    spec, tape, model = ops.spec, ops.tape, ops.spec.model
    made: list[Value] = []
    for linear, norm, heads in zip(
        model.linears[:3], ("q_norm", "k_norm", None), (model.heads, model.kv_heads, 0), strict=True
    ):
        value = ops.linear(normed, linear)
        if model.qk_norm and norm and not model.family.gemma:
            value = _rebind(tape, value, ops.rms_norm(value, norm, model.head_dim, spec.tokens * heads))
        made.append(value)
    if model.qk_norm and model.family.gemma:
        for index, (norm, heads) in enumerate((("q_norm", model.heads), ("k_norm", model.kv_heads))):
            normed_heads = ops.rms_norm(made[index], norm, model.head_dim, spec.tokens * heads)
            made[index] = _rebind(tape, made[index], normed_heads)
    return made[0], made[1], made[2]


def _mlp(spec: LayerSpec, tape: Tape, normed: Value) -> Value:
    """The MLP between the marks of its module."""
    ops, model = Ops(spec, tape), spec.model
    tape.mark("pre", "mlp")
    if spec.unsloth:
        return ops.boundary(FusedOps(spec, tape).mlp(normed), "mlp")
    if model.family.fused_gate_up:
        gate_up, down = model.linears[-2:]
        return ops.boundary(ops.fused_gated_mlp(normed, gate_up, down), "mlp")
    gate, up, down = model.linears[-3:]
    if model.model_type == "qwen":  # w2 is what the activation goes through; and attention has a c_proj too
        gate, up, down = up, gate, replace(down, name="mlp.c_proj")
    if spec.tiled:
        return ops.boundary(tiled_mlp(spec, tape, normed, gate, up, down), "mlp")
    return ops.boundary(ops.gated_mlp(normed, gate, up, down), "mlp")


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
