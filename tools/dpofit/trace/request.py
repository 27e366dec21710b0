"""What to trace: shapes and switches of one training step, all plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["deepspeed", "autocast", "pure_bf16"]
Checkpointing = Literal["reentrant", "nonreentrant", "unsloth", "none"]
Attention = Literal["sdpa", "fa2", "eager"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One step of one rank. `rows` is 2B for preference stages and B for SFT; `tokens` is the padded row length.

    `precision`: `deepspeed` (every parameter bf16, no autocast: ZeRO with bf16), `autocast` (trainable parameters
    fp32, frozen bf16, bf16 autocast: `bf16: true` without DeepSpeed), `pure_bf16`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied_embeddings: bool
    rows: int
    tokens: int
    quantization_bit: int | None = None  # 4, 8: by bitsandbytes
    double_quantization: bool = False
    max_positions: int = 32768
    architecture: tuple[tuple[str, Any], ...] = ()  # keys of config.json that only some families have
    stage: str = "dpo"
    pref_loss: str = "sigmoid"
    finetuning: str = "full"
    ref_model: bool = False  # named in the recipe: a second model even beside adapters
    ref_quantization_bit: int | None = None
    upcast_layernorm: bool = False
    upcast_lmhead_output: bool = False
    freeze_layers: int = 2
    freeze_modules: tuple[str, ...] = ("all",)
    freeze_extra: tuple[str, ...] = ()
    lora_rank: int = 8
    lora_target: tuple[str, ...] = ("all",)
    use_dora: bool = False
    additional_target: tuple[str, ...] = ()
    precision: Precision = "deepspeed"
    checkpointing: Checkpointing = "reentrant"
    liger: bool = False
    unsloth: bool = False  # use_unsloth
    attention: Attention = "sdpa"
    padding: bool = True
    packed: bool = False  # neat_packing
    pref_ftx: float = 0.0
    ld_alpha: float | None = None
    micro_batches: int = 1  # gradient accumulation steps
    steps: int = 1
    optimizer: str = "adamw_torch_fused"  # the Trainer's name; "" for no optimizer step
    own_optimizer: tuple[tuple[str, Any], ...] = ()  # LLaMA-Factory's keys for one of its own: use_muon, use_galore …
    weight_decay: float = 0.0
    world_size: int = 1
    rank: int = 0
    deepspeed: dict[str, Any] = field(default_factory=dict, hash=False)  # the JSON; empty is none
    transformers: tuple[int, int] = (5, 5)  # whose loss and attention code; older ones replace the installed one's
    cuda: bool = True  # False: what the CPU kernels do, to compare with a real run on the CPU
    long_context: tuple[str, ...] = ()  # pieces that are on (recipe/long_context.py PIECES)
    answers: int = 0  # positions of a batch that predict a label, for answer_logps
    shared: tuple[int, int, int] | None = None  # prompt, chosen, rejected tokens of a pair, for shared_prompt
    multiprocessors: int = 132  # of the GPU: Liger's RMSNorm backward keeps one fp32 row for each

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        values: dict[str, Any] = {
            "model_type": self.model_type, "vocab_size": self.vocab_size, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "tie_word_embeddings": self.tied_embeddings, "max_position_embeddings": self.max_positions,
            "dtype": "bfloat16",
        }  # fmt: skip
        return values | dict(self.architecture)
