"""How decoder layers compute in one job: shapes, dtypes, kernels, adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dpofit.memory.bands import Band
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
    dora: bool = False


@dataclass(frozen=True, slots=True)
class SharedRow:
    """Tokens of one pair laid out as prompt, chosen, rejected, without padding (dpofit.train.longdpo.shared_row)."""

    prompt: int  # what both rows begin with
    chosen: int
    rejected: int

    @property
    def first(self) -> int:
        """Queries of the first attention call: prompt and chosen answer."""
        return self.prompt + self.chosen

    @property
    def second(self) -> int:
        """Keys of the second, whose queries are the rejected answer's: prompt and rejected answer."""
        return self.prompt + self.rejected

    @property
    def tokens(self) -> int:
        return self.prompt + self.chosen + self.rejected


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a frozen base's linear weights are stored. `nested`: their scales are quantized too."""

    method: str  # bnb
    bits: int
    nested: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How layers compute: what is trained, in which dtype, with which kernels."""

    model: ModelShape
    rows: int
    tokens_per_row: int
    attention: Attention
    liger: bool
    trained: frozenset[str]  # modules whose own weights are trained
    autocast: bool  # no DeepSpeed, not pure_bf16: torch.autocast
    wide_training: bool  # under it, trained weights are fp32
    lora: Lora | None = None
    linears_save_inputs: bool = False  # ZeRO-3: deepspeed runtime/zero/linear.py saves them, frozen weight or not
    wide_norms: bool = False  # upcast_layernorm
    lora_active: bool = True  # False in the reference forward of a LoRA run
    quantization: Quantization | None = None  # of the frozen base
    shared: SharedRow | None = None  # shared_prompt: what the one row is made of
    tiled: bool = False  # tiled_mlp
    padded: bool = True  # some row is shorter than the longest
    packed: bool = False  # neat_packing: the rows are several samples that don't see each other
    unsloth: bool = False  # use_unsloth: its layers

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def residual_bytes(self) -> int:
        """Bytes per element of the residual stream: fp32 when embeddings are trained, in fp32, under autocast."""
        return FP32 if self.wide("embed_tokens") else BF16

    def wide(self, module: str) -> bool:
        """Is the module's weight fp32? Then its norm's output is too, and autocast copies its linear's to bf16."""
        return (self.wide_training and module in self.trained) or (
            self.autocast and self.wide_norms and module.endswith("norm")
        )

    def in_band(self, band: Band) -> LayerSpec:
        """The same inside these layers."""
        return replace(self, trained=band.trained | (self.trained & {"embed_tokens"}))

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
