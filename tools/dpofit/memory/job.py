"""A Job: a recipe, a model, a cluster, lengths and library versions; everything the memory model reads."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.hardware.cluster import Cluster
from dpofit.memory.spec import BF16, FP32, Attention, LayerSpec, Lora
from dpofit.models.shape import ModelShape
from dpofit.recipe.recipe import Recipe, ZeroConfig

LIGER_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
NO_REFERENCE = frozenset({"orpo", "simpo"})


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one pair after truncation. `padded`: some row is shorter than the longest, so a mask is built."""

    prompt: int
    chosen: int
    rejected: int
    padded: bool = True

    @property
    def row_tokens(self) -> int:
        """Longest row, padded to a multiple of 8 (llamafactory 0.9.5 train/*/workflow.py pad_to_multiple_of=8)."""
        return -(-max(self.prompt + max(self.chosen, self.rejected), 1) // 8) * 8  # rows are never empty


@dataclass(frozen=True, slots=True)
class Stack:
    """Library versions, which decide what a step costs."""

    llamafactory: str = "0.9.5"
    transformers: str = "5.5.4"
    torch: str = "2.13.0"
    deepspeed: str = "0.18.4"

    def at_least(self, library: str, version: str) -> bool:
        """Is `library` at `version` or newer?"""
        return _numbers(getattr(self, library)) >= _numbers(version)


PINNED = Stack()
# What the field notes and most public reports of 2024 ran.
STACK_2024 = Stack(llamafactory="0.9.0", transformers="4.45.2", torch="2.4.0", deepspeed="0.15.4")


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Job:
    """One planned run."""

    recipe: Recipe
    model: ModelShape
    cluster: Cluster
    lengths: Lengths
    stack: Stack = PINNED

    # who computes
    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @property
    def zero_stage(self) -> int:
        return self.recipe.zero.stage if self.recipe.zero else 0

    @property
    def zero(self) -> ZeroConfig:
        assert self.recipe.zero is not None
        return self.recipe.zero

    # what is trained
    @property
    def full(self) -> bool:
        return self.recipe.finetuning == "full"

    @property
    def preference(self) -> bool:
        return self.recipe.stage == "dpo"

    @property
    def has_reference(self) -> bool:
        return self.preference and self.recipe.pref_loss not in NO_REFERENCE

    @property
    def reference_copy(self) -> bool:
        """A second whole model: full fine-tuning, or a ref_model named in the recipe."""
        return self.has_reference and (self.full or self.recipe.ref_model is not None)

    @property
    def autocast(self) -> bool:
        """fp32 trainable weights under torch.autocast: no DeepSpeed and not pure_bf16."""
        return self.recipe.zero is None and not self.recipe.pure_bf16

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trainable weight as the forward finds it: DeepSpeed makes all bf16; without it LLaMA-Factory
        upcasts (0.9.5 model/adapter.py:316-346) unless pure_bf16, and PEFT upcasts adapters even then (0.18.1
        get_peft_model autocast_adapter_dtype)."""
        if self.recipe.zero is not None or (self.full and self.recipe.pure_bf16):
            return BF16
        return FP32

    @property
    def lora_targets(self) -> frozenset[str]:
        """Module names that get an adapter; `all` is every linear of the layers (not the output head)."""
        names = frozenset(linear.name for linear in self.model.linears)
        return names if "all" in self.recipe.lora_target else names & frozenset(self.recipe.lora_target)

    @property
    def lora_parameters_per_layer(self) -> int:
        return sum(
            self.recipe.lora_rank * (linear.in_features + linear.out_features)
            for linear in self.model.linears
            if linear.name in self.lora_targets
        )

    @property
    def trained_parameters(self) -> int:
        return self.model.parameters if self.full else self.model.layers * self.lora_parameters_per_layer

    @property
    def liger(self) -> bool:
        """Liger's kernels run: it knows the architecture (llamafactory 0.9.5 model_utils/liger_kernel.py)."""
        return self.recipe.liger and self.model.model_type in LIGER_MODEL_TYPES

    @property
    def fused_loss(self) -> bool:
        """Liger's fused linear cross-entropy replaces the loss; LLaMA-Factory turns it off when logits are needed."""
        return self.liger and self.recipe.stage == "sft"

    # lengths
    @property
    def rows(self) -> int:
        return self.recipe.micro_batch * (2 if self.preference else 1)

    @property
    def eval_rows(self) -> int:
        return self.recipe.eval_micro_batch * (2 if self.preference else 1)

    @property
    def attention(self) -> Attention:
        """The kernel that runs: `auto` is transformers' default, sdpa; sdpa with a mask is the efficient kernel."""
        kind = self.recipe.flash_attn
        if kind == "disabled":
            return "eager"
        if kind in ("fa2", "fa3"):
            return "flash_varlen" if self.lengths.padded else "flash"
        return "efficient" if self.lengths.padded else "flash"

    def layer_spec(self, rows: int, trained: bool) -> LayerSpec:
        """How layers compute with `rows` rows; `trained` False for a frozen whole reference model."""
        lora = None
        if trained and not self.full:
            dropout = self.recipe.lora_dropout > 0 and not self.preference  # dpo/trainer.py disables dropout
            lora = Lora(self.recipe.lora_rank, self.lora_targets, self.trained_bytes, dropout)
        return LayerSpec(
            model=self.model,
            rows=rows,
            tokens_per_row=self.lengths.row_tokens,
            attention=self.attention,
            liger=self.liger,
            weights_trained=trained and self.full,
            autocast=self.autocast,
            lora=lora,
            dequantized_bytes_per_weight=BF16 if self.recipe.quantization_bit == 4 and trained else 0,
        )
