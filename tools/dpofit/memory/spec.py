"""How decoder layers compute in one job: shapes, dtypes, kernels, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpofit.models.shape import ModelShape

Attention = Literal["flash", "flash_varlen", "efficient", "eager"]
BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of one run; `adapter_bytes` is 4 where LLaMA-Factory upcasts trainable weights, else 2."""

    rank: int
    targets: frozenset[str]
    adapter_bytes: int
    dropout: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How layers compute: what is trained, in which dtype, with which kernels."""

    model: ModelShape
    rows: int
    tokens_per_row: int
    attention: Attention
    liger: bool
    weights_trained: bool  # full fine-tuning
    autocast: bool  # no DeepSpeed, not pure_bf16: fp32 trainable weights under torch.autocast
    lora: Lora | None = None
    lora_active: bool = True  # False in the reference forward of a LoRA run
    dequantized_bytes_per_weight: int = 0  # 4-bit base: each linear first writes its bf16 weight

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def residual_bytes(self) -> int:
        """Bytes per element of the residual stream: fp32 when fp32 embeddings and norms are trained under autocast."""
        return FP32 if self.autocast and self.weights_trained else BF16

    @property
    def hidden(self) -> int:
        """Bytes of one [rows, tokens, hidden] bf16 tensor."""
        return self.tokens * self.model.hidden_size * BF16

    @property
    def query(self) -> int:
        return self.tokens * self.model.heads * self.model.head_dim * BF16

    @property
    def key(self) -> int:
        return self.tokens * self.model.kv_heads * self.model.head_dim * BF16
