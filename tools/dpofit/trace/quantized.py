"""bitsandbytes' linear layers by what they store and allocate: the package's own kernels need a CUDA card.

A stand-in `bitsandbytes` lets PEFT's own LoRA layers for quantized weights run. Follows bitsandbytes 0.50.2
autograd/_functions.py (MatMul8bitLt, MatMul4Bit), backends/cuda/ops.py (_dequant_linear_fallback, taken above 1,536
tokens; int8_vectorwise_quant, int8_mm_dequant), functional.py (dequantize_4bit).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

BLOCK, NESTED_BLOCK = 64, 256  # weights an absmax of 4-bit weights, absmaxes a nested one


class Linear4bit(torch.nn.Module):
    """Packed weights, one absmax a block, in 8 bits with fp32 ones over them when nested (double quantization).

    Integer buffers stand for fp32 ones of their size: casts of the model to bf16 leave the real ones alone too."""

    compute_dtype = torch.bfloat16

    def __init__(self, linear: torch.nn.Linear, nested: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        count = linear.weight.numel()
        packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.weight.compress_statistics, self.weight.quant_type = nested, "nf4"  # type: ignore[attr-defined]
        self.nested, self.blocks = nested, -(-count // BLOCK)
        self.register_buffer("absmax", torch.empty(self.blocks, dtype=torch.uint8 if nested else torch.int32))
        self.register_buffer("code", torch.empty(16, dtype=torch.int32))
        if nested:
            self.register_buffer("absmax2", torch.empty(-(-self.blocks // NESTED_BLOCK), dtype=torch.int32))
            self.register_buffer("code2", torch.empty(256, dtype=torch.int32))

    def dequantized(self, in_place: bool) -> torch.Tensor:
        """The bf16 weight. The fused forward adds the offset of nested absmaxes out of place."""
        if self.nested:
            absmax = torch.empty(self.blocks, dtype=torch.float32, device=self.weight.device)
            shifted = absmax if in_place else absmax + 1.0
            del absmax, shifted  # both live while the weight is made
            kept = [torch.empty(self.blocks, dtype=torch.float32, device=self.weight.device) for _ in range(2)]
            if in_place:
                kept.pop()
        shape = (self.out_features, self.in_features)
        return torch.empty(shape, dtype=self.compute_dtype, device=self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _MatMul4Bit.apply(x, self.weight, self)  # type: ignore[no-any-return]


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Linear4bit) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.dequantized(in_place=False), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.matmul(grad, ctx.layer.dequantized(in_place=True).to(grad.dtype)), None, None


class Linear8bitLt(torch.nn.Module):
    """int8 weights with one fp32 maximum a row; activations are quantized row by row, but for outlier columns."""

    def __init__(self, linear: torch.nn.Linear, nested: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = torch.nn.Parameter(torch.empty(linear.weight.shape, dtype=torch.int8), requires_grad=False)
        self.register_buffer("SCB", torch.empty(linear.out_features, dtype=torch.int32))
        self.state = SimpleNamespace(has_fp16_weights=False, threshold=6.0)
        self.index = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _MatMul8bitLt.apply(x, self.weight, self)  # type: ignore[no-any-return]


class _MatMul8bitLt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: torch.Tensor, B: torch.Tensor, layer: Linear8bitLt) -> torch.Tensor:
        shape = A.shape
        A = A.reshape(-1, A.shape[-1])
        CA, SCA = _vectorwise_quant(A.to(torch.float16))
        sub_a = A[:, :1].contiguous()  # activations of large models have outliers in a few columns: one stands for them
        output = _scaled_mm(CA, B, SCA, layer.bias, A.dtype)
        output = output.addmm(sub_a, torch.empty(1, B.shape[0], dtype=A.dtype, device=A.device))
        ctx.layer, ctx.shape = layer, shape
        ctx.tensors = (sub_a, A) if any(ctx.needs_input_grad[:2]) else None  # attributes: alive as long as the graph
        return output.reshape(*shape[:-1], B.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.reshape(-1, grad.shape[-1])
        weight = ctx.layer.weight.to(ctx.tensors[1].dtype, copy=True)
        return torch.matmul(grad, weight).view(ctx.shape), None, None


def _vectorwise_quant(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ops.py int8_vectorwise_quant: rows' maxima, int8 rows, and a search for outliers."""
    stats = torch.empty(A.shape[0], dtype=torch.float32, device=A.device)
    rows = torch.empty(A.shape, dtype=torch.int8, device=A.device)
    outliers = A.abs() >= 6.0
    outliers.any()
    return rows, stats


def _scaled_mm(CA: torch.Tensor, B: torch.Tensor, SCA: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
    """int8_scaled_mm: an int32 product, dequantized to fp16, then cast."""
    product = torch.empty(CA.shape[0], B.shape[0], dtype=torch.int32, device=CA.device)
    half = torch.empty_like(product, dtype=torch.float16)
    if bias is not None:
        half.add_(bias)
    return half.to(dtype)


def quantize(model: torch.nn.Module, bits: int, nested: bool) -> None:
    """transformers' replacement of every linear layer but the output head."""
    layer = Linear4bit if bits == 4 else Linear8bitLt
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(module, name, layer(child, nested))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8  # type: ignore[assignment]


@contextmanager
def importable() -> Iterator[None]:
    """Inside, PEFT finds `bitsandbytes` and wraps its layers in those it has for them."""
    import peft.import_utils
    import peft.tuners.lora.model as lora

    package = ModuleType("bitsandbytes")
    package.nn = SimpleNamespace(Linear4bit=Linear4bit, Linear8bitLt=Linear8bitLt)  # type: ignore[attr-defined]
    path = Path(lora.__file__).with_name("bnb.py")
    with ExitStack() as stack:
        for owner in (peft.import_utils, lora):
            for name in ("is_bnb_available", "is_bnb_4bit_available"):
                stack.enter_context(mock.patch.object(owner, name, lambda: True))
        stack.enter_context(mock.patch.dict(sys.modules, {"bitsandbytes": package}))
        spec = importlib.util.spec_from_file_location("peft.tuners.lora.bnb", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        stack.enter_context(mock.patch.dict(sys.modules, {"peft.tuners.lora.bnb": module}))
        yield
