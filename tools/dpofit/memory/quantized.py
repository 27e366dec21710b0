"""A frozen base in few bits: what its linear layers store, and what each use of one allocates.

Sources: bitsandbytes 0.50.2 nn/modules.py, functional.py, autograd/_functions.py, backends/cuda/ops.py; llamafactory
0.9.5 model/model_utils/quantization.py, which leaves embeddings, norms and the output head in 16 bits.
"""

from __future__ import annotations

import math

from dpofit.memory.spec import BF16, FP32, LayerSpec, Quantization
from dpofit.memory.tape import Storage, Tape, Value
from dpofit.models.shape import Linear

NF4_BLOCK, NESTED_BLOCK = 64, 256  # weights with one absmax; absmaxes with one of their own (double quantization)


def stored_bytes(kind: Quantization, linear: Linear) -> int:
    """Bytes of one layer's weight with its scales, without the bias, which stays bf16."""
    weights = linear.in_features * linear.out_features
    if kind.bits == 8:  # Int8Params: one fp32 maximum for each row
        return weights + linear.out_features * FP32
    blocks = math.ceil(weights / NF4_BLOCK)
    nested = blocks + math.ceil(blocks / NESTED_BLOCK) * FP32
    return math.ceil(weights / 2) + (nested if kind.nested else blocks * FP32)


def quantized_linear(spec: LayerSpec, tape: Tape, x: Value, linear: Linear, kind: Quantization) -> Value:
    """Its output, held; its backward gives x a gradient."""
    tape.mark("pre", linear.name)
    forward = _int8_forward if kind.bits == 8 else _dequantizing_forward
    y = Value(forward(spec, tape, linear, kind), x.needs_grad)
    if kind.bits == 8 and tape.grad and y.needs_grad:
        tape.keep(x.storage)  # MatMul8bitLt keeps its input as an attribute of its context

    def backward(grad: Storage) -> None:
        absmax = None
        if kind.bits == 4:
            absmax = tape.new(f"{linear.name}.absmax", _nested_bytes(linear, kind), "workspace")
        weight = tape.new(f"{linear.name}.dequantized", linear.in_features * linear.out_features * BF16, "workspace")
        tape.drop(absmax)
        gradient = tape.new(f"{linear.name}.grad_in", spec.tokens * linear.in_features * BF16, "activation_grads")
        gradient.view = True
        tape.drop(weight)
        tape.give(x, gradient)

    tape.node(y, [], backward, linear.name)
    tape.mark("post", linear.name)
    return y


def _dequantizing_forward(spec: LayerSpec, tape: Tape, linear: Linear, kind: Quantization) -> Storage:
    """_dequant_linear_fallback, taken above 1,536 tokens (below them only on cards where it is faster)."""
    absmax = tape.new(f"{linear.name}.absmax", _nested_bytes(linear, kind), "workspace")
    shifted = tape.new(f"{linear.name}.absmax_shifted", _nested_bytes(linear, kind), "workspace")
    weight = tape.new(f"{linear.name}.dequantized", linear.in_features * linear.out_features * BF16, "workspace")
    out = tape.new(f"{linear.name}.out", spec.tokens * linear.out_features * BF16, "activations")
    tape.drop(weight, shifted, absmax)
    return out


def _nested_bytes(linear: Linear, kind: Quantization) -> int:
    """fp32 absmaxes, written out when they are stored in 8 bits."""
    return math.ceil(linear.in_features * linear.out_features / NF4_BLOCK) * FP32 if kind.nested else 0


def _int8_forward(spec: LayerSpec, tape: Tape, linear: Linear, kind: Quantization) -> Storage:
    """MatMul8bitLt.forward: rows to fp16, then int8; an int32 product, to fp16, to bf16; outlier columns are added."""
    name, inputs, outputs = linear.name, spec.tokens * linear.in_features, spec.tokens * linear.out_features
    half = tape.new(f"{name}.fp16", inputs * BF16, "workspace")
    maxima = tape.new(f"{name}.row_maxima", spec.tokens * FP32, "workspace")
    rows = tape.new(f"{name}.int8", inputs, "workspace")
    magnitudes = tape.new(f"{name}.magnitudes", inputs * BF16, "workspace")
    outliers = tape.new(f"{name}.outliers", inputs, "workspace")
    tape.drop(magnitudes, outliers, half)
    product = tape.new(f"{name}.int32", outputs * FP32, "workspace")
    narrow = tape.new(f"{name}.product_fp16", outputs * BF16, "workspace")
    scaled = tape.new(f"{name}.scaled", outputs * BF16, "workspace")
    tape.drop(product, narrow)
    out = tape.new(f"{name}.out", outputs * BF16, "activations")
    tape.drop(scaled, rows, maxima)
    return out
