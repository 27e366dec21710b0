"""RMSNorm on the tape: Llama's, Gemma's, and the kernel of Liger and unsloth.

Sources: transformers 5.5.4 models/qwen2/modeling_qwen2.py, models/gemma2/modeling_gemma2.py; liger-kernel 0.8.5
ops/rms_norm.py. Sizes are bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpofit.memory.spec import BF16, FP32
from dpofit.memory.tape import Storage, Value

if TYPE_CHECKING:
    from dpofit.memory.ops import Ops


def rms_norm(ops: Ops, x: Value, name: str, width: int, count: int) -> Value:
    """RMSNorm over `count` rows of `width` elements; x is bf16, or the fp32 residual stream."""
    if ops.spec.liger or ops.spec.unsloth:
        return _fused(ops, x, name, width, count)
    return _gemma(ops, x, name, width, count) if ops.spec.model.family.gemma else _llama(ops, x, name, width, count)


def _llama(ops: Ops, x: Value, name: str, width: int, count: int) -> Value:
    """weight * normed.to(x's dtype): an fp32 weight makes the output of bf16 rows fp32."""
    spec, tape, elements = ops.spec, ops.tape, width * count
    wide_in = x.storage.size_bytes == elements * FP32
    trained = name in spec.trained
    wide_out = wide_in or spec.wide(name)
    tape.mark("pre", name)
    x32, rstd, normed = _normalized(ops, x, name, elements, count)
    saved = [tape.hold(x32), rstd] if tape.grad and x.needs_grad else []
    tape.drop(x32)  # hidden_states is rebound
    low = tape.hold(normed) if wide_in else tape.new(f"{name}.normed", elements * BF16, "activations")
    out = tape.new(f"{name}.out", elements * (FP32 if wide_out else BF16), "activations")
    y = Value(out, x.needs_grad or trained)

    def backward(grad: Storage) -> None:
        low_grad = tape.new(f"{name}.grad_normed", out.size_bytes, "activation_grads")
        if trained:
            tape.temporary(f"{name}.grad_weight", out.size_bytes)
            ops.weight_gradient(name, width, computed_wide=wide_out)
            tape.drop(low)
        if not x.needs_grad:
            tape.drop(low_grad)
            return
        if wide_out and not wide_in:  # the gradient of the bf16 factor
            narrow = tape.new(f"{name}.grad_narrow", elements * BF16, "activation_grads")
            tape.drop(low_grad)
            low_grad = narrow
        grad32 = low_grad if wide_in else tape.new(f"{name}.grad32", elements * FP32, "activation_grads")
        if not wide_in:
            tape.drop(low_grad)
        _normalized_backward(ops, x, name, elements, grad32, wide_in)

    tape.node(y, saved, backward, name)
    tape.drop(saved[0] if saved else None, rstd, normed)
    if not (trained and tape.grad):  # else saved, and let go of where the product's own backward is done
        tape.drop(low)
    tape.mark("post", name)
    return y


def _gemma(ops: Ops, x: Value, name: str, width: int, count: int) -> Value:
    """(normed * (1 + weight.float())).to(x's dtype): the product in fp32, the output as wide as x."""
    spec, tape, elements = ops.spec, ops.tape, width * count
    wide_in = x.storage.size_bytes == elements * FP32
    trained = name in spec.trained
    tape.mark("pre", name)
    x32, rstd, normed = _normalized(ops, x, name, elements, count)
    saved = [tape.hold(x32), rstd] if tape.grad and x.needs_grad else []
    tape.drop(x32)  # _norm has returned
    scaled = tape.new(f"{name}.scaled", elements * FP32, "activations")
    if not (trained and tape.grad):  # else saved, and let go of where the product's own backward is done
        tape.drop(normed)  # output is rebound
    out = scaled if wide_in else tape.new(f"{name}.out", elements * BF16, "activations")
    y = Value(out, x.needs_grad or trained)

    def backward(grad: Storage) -> None:
        scaled_grad = tape.hold(grad) if wide_in else tape.new(f"{name}.grad32", elements * FP32, "activation_grads")
        normed_grad = tape.new(f"{name}.grad_normed", elements * FP32, "activation_grads")
        if trained:
            tape.temporary(f"{name}.grad_weight", elements * FP32)
            ops.weight_gradient(name, width, computed_wide=True)
            tape.drop(normed)
        tape.drop(scaled_grad)
        if not x.needs_grad:
            tape.drop(normed_grad)
            return
        _normalized_backward(ops, x, name, elements, normed_grad, wide_in)

    tape.node(y, saved, backward, name)
    tape.drop(rstd, *(one for one in saved if one is not rstd))
    if not wide_in:
        tape.drop(scaled)
    tape.mark("post", name)
    return y


def _normalized(ops: Ops, x: Value, name: str, elements: int, count: int) -> tuple[Storage, Storage, Storage]:
    """x in fp32, 1 / root mean square of each row, and their product, all held."""
    tape = ops.tape
    wide_in = x.storage.size_bytes == elements * FP32
    x32 = tape.hold(x.storage) if wide_in else tape.new(f"{name}.fp32", elements * FP32, "activations")
    square = tape.new(f"{name}.square", elements * FP32, "workspace")
    rstd = tape.new(f"{name}.rstd", count * FP32, "activations")
    tape.drop(square)
    return x32, rstd, tape.new(f"{name}.normed32", elements * FP32, "activations")


def _normalized_backward(ops: Ops, x: Value, name: str, elements: int, grad32: Storage, wide_in: bool) -> None:
    """From the product's fp32 gradient, which it lets go of, to that of x."""
    tape = ops.tape
    x_grad = tape.new(f"{name}.grad_x", elements * FP32, "activation_grads")
    tape.temporary(f"{name}.grad_rstd", elements * FP32)
    tape.drop(grad32)
    mean_grad = tape.new(f"{name}.grad_mean", elements * FP32, "workspace")
    # FunctionsManual.cpp pow_backward: grad * (2 * self.pow(1)), whose temporaries live to its end
    power = tape.new(f"{name}.grad_pow", elements * FP32, "workspace")
    doubled = tape.new(f"{name}.grad_doubled", elements * FP32, "workspace")
    square_grad = tape.new(f"{name}.grad_square", elements * FP32, "workspace")
    tape.drop(power, doubled, mean_grad, square_grad)
    if wide_in:
        tape.give(x, x_grad)
    else:
        result = tape.new(f"{name}.grad_in", elements * BF16, "activation_grads")
        tape.drop(x_grad)
        tape.give(x, result)


def _fused(ops: Ops, x: Value, name: str, width: int, count: int) -> Value:
    """Liger's kernel and unsloth's: each saves X and fp32 rstd; the backward writes dX over dY, Liger's where the
    family's norm says in_place (unsloth 2026.10.9 kernels/rms_layernorm.py:950-1016, reuse_grad)."""
    tape = ops.tape
    trained = name in ops.spec.trained
    tape.mark("pre", name)
    y = Value(tape.new(f"{name}.out", x.storage.size_bytes, "activations"), x.needs_grad or trained)
    rstd = tape.new(f"{name}.rstd", count * FP32, "activations")

    def backward(grad: Storage) -> None:
        in_place = ops.spec.unsloth or ops.spec.model.family.liger_norms_in_place
        x_grad = tape.hold(grad) if in_place else tape.new(f"{name}.grad_in", grad.size_bytes, "activation_grads")
        if trained:
            ops.weight_gradient(name, width)
        tape.give(x, x_grad)

    tape.node(y, [x.storage, rstd], backward, name)
    tape.drop(rstd)
    tape.mark("post", name)
    return y
