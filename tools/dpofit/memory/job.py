"""A Job: a recipe, a model, a cluster, lengths and library versions; everything the memory model reads."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.hardware.cluster import Cluster
from dpofit.memory.bands import Band, Selection, Trained, bands, own_parameters, trained_modules
from dpofit.memory.spec import BF16, FP32, Attention, LayerSpec, Lora, Quantization, SharedRow
from dpofit.models.family import FAMILIES
from dpofit.models.shape import ModelShape
from dpofit.recipe.recipe import Recipe, ZeroConfig

LIGER_MODEL_TYPES = frozenset(name for name, family in FAMILIES.items() if family.liger)
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

    def on(self, piece: str) -> bool:
        """Is a long-context piece on (recipe/long_context.py PIECES)?"""
        return piece in self.recipe.long_context

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
    def adapters(self) -> bool:
        return self.recipe.finetuning == "lora"

    @property
    def trained(self) -> Trained:
        """The model's own modules whose weights are trained."""
        return trained_modules(Selection.of(self.recipe), self.model)

    @property
    def bands(self) -> tuple[Band, ...]:
        """The layers, grouped by how they compute."""
        return bands(self.trained, self.adapters, self.recipe.gradient_checkpointing)

    @property
    def checkpointed_layers(self) -> int:
        """LLaMA-Factory checkpoints only layers that train something (checkpointing.py:79-101)."""
        return sum(band.count for band in self.bands if band.checkpointed)

    @property
    def tied_embeddings(self) -> bool:
        """The head computes with the embedding's weight; whole modules beside adapters are copies, which untie them."""
        apart = self.adapters and self.trained.outside & {"embed_tokens", "lm_head"}
        return self.model.tied_embeddings and not apart

    @property
    def copied_parameters(self) -> int:
        """The model's own parameters that are trained as copies beside the frozen ones (peft's modules_to_save)."""
        return self.own_trained_parameters if self.adapters else 0

    @property
    def score_head_bytes(self) -> int:
        """Bytes of an element of a reward model's score: made in fp32, which only DeepSpeed undoes."""
        return FP32 if self.recipe.zero is None else BF16

    @property
    def embedding_needs_grad(self) -> bool:
        """The embedding's output requires a gradient when it leaves the module: it is trained, or PEFT's hook says so
        (enable_input_require_grads). LLaMA-Factory's checkpointing says so only later."""
        return "embed_tokens" in self.trained.outside or (self.adapters and self.recipe.gradient_checkpointing)

    @property
    def preference(self) -> bool:
        """Log-probs of answers are compared, the reference's among them."""
        return self.recipe.stage in ("dpo", "kto")

    @property
    def pairs(self) -> bool:
        """A batch of B has B chosen and B rejected rows."""
        return self.recipe.stage in ("dpo", "rm")

    @property
    def passes(self) -> int:
        """Forwards of each model a step: KTO's second, without gradients, is for its KL estimate."""
        return 2 if self.recipe.stage == "kto" else 1

    @property
    def has_reference(self) -> bool:
        return self.preference and (self.recipe.stage == "kto" or self.recipe.pref_loss not in NO_REFERENCE)

    @property
    def reference_in_step(self) -> bool:
        """The reference is asked in every step, not once before the first."""
        return self.has_reference and not self.on("cached_reference")

    @property
    def reference_copy(self) -> bool:
        """A second whole model that stays, unless the policy's adapters can be switched off; or a ref_model named in
        the recipe."""
        return self.reference_in_step and (not self.adapters or self.recipe.ref_model is not None)

    @property
    def adapters_switched_off(self) -> bool:
        """In every step the policy itself is asked as the reference."""
        return self.reference_in_step and not self.reference_copy

    @property
    def autocast(self) -> bool:
        """fp32 trainable weights under torch.autocast: no DeepSpeed and not pure_bf16."""
        return self.recipe.zero is None and not self.recipe.pure_bf16 and (self.recipe.bf16 or self.recipe.fp16)

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trainable weight as the forward finds it: DeepSpeed makes all bf16; without it LLaMA-Factory
        upcasts (0.9.5 model/adapter.py:316-346) unless pure_bf16, and PEFT upcasts adapters even then (0.18.1
        get_peft_model autocast_adapter_dtype), or BAdam trains."""
        narrow = self.recipe.pure_bf16 or self.recipe.badam is not None
        return BF16 if self.recipe.zero is not None or (not self.adapters and narrow) else FP32

    @property
    def updated_bytes(self) -> int:
        """The same as the optimizer finds it, without DeepSpeed: BAdam has fp32 copies of what is trained."""
        return FP32 if self.recipe.badam is not None else self.trained_bytes

    @property
    def quantization(self) -> Quantization | None:
        """How the frozen base is stored, if not in bf16."""
        return self._quantization(self.recipe.quantization_bit)

    @property
    def reference_quantization(self) -> Quantization | None:
        """How a second model is stored: ref_model_quantization_bit says, not quantization_bit (llamafactory 0.9.5
        train/trainer_utils.py create_ref_model)."""
        return self._quantization(self.recipe.ref_model_quantization_bit if self.recipe.ref_model else None)

    def _quantization(self, bits: int | None) -> Quantization | None:
        if bits is None:
            return None
        return Quantization(self.recipe.quantization_method, bits, self.recipe.double_quantization and bits == 4)

    @property
    def lora_targets(self) -> frozenset[str]:
        """Module names that get an adapter; `all` is every linear of the layers (not the output head)."""
        names = frozenset(linear.name for linear in self.model.linears)
        return names if "all" in self.recipe.lora_target else names & frozenset(self.recipe.lora_target)

    @property
    def lora_parameters_per_layer(self) -> int:
        """Two matrices at each target; DoRA's magnitudes too, one for each output."""
        targets = [linear for linear in self.model.linears if linear.name in self.lora_targets]
        magnitudes = sum(linear.out_features for linear in targets) if self.recipe.use_dora else 0
        matrices = sum(self.recipe.lora_rank * (linear.in_features + linear.out_features) for linear in targets)
        return matrices + magnitudes

    @property
    def trained_parameters(self) -> int:
        return self.own_trained_parameters + self.adapter_parameters

    @property
    def own_trained_parameters(self) -> int:
        """Without adapters."""
        return own_parameters(Selection.of(self.recipe), self.model)

    @property
    def adapter_parameters(self) -> int:
        return self.model.layers * self.lora_parameters_per_layer if self.adapters else 0

    @property
    def liger(self) -> bool:
        """Liger's kernels run: it knows the architecture (llamafactory 0.9.5 model_utils/liger_kernel.py)."""
        return self.recipe.liger and self.model.model_type in LIGER_MODEL_TYPES

    @property
    def fused_loss(self) -> bool:
        """Liger's fused linear cross-entropy replaces the loss; LLaMA-Factory turns it off when logits are needed."""
        return self.liger and self.recipe.stage == "sft" and not self.on("answer_logps")

    # lengths
    @property
    def shared(self) -> SharedRow | None:
        """The row that a pair is laid out as under shared_prompt."""
        lengths = self.lengths
        if not self.on("shared_prompt"):
            return None
        return SharedRow(max(lengths.prompt, 1), max(lengths.chosen, 1), max(lengths.rejected, 1))

    @property
    def rows(self) -> int:
        """Rows that the layers compute in one micro-batch."""
        return self.recipe.micro_batch * self._rows_of_one

    @property
    def eval_rows(self) -> int:
        return self.recipe.eval_micro_batch * self._rows_of_one

    @property
    def _rows_of_one(self) -> int:
        return 2 if self.pairs and not self.on("shared_prompt") else 1

    @property
    def row_tokens(self) -> int:
        """Tokens of each of these rows."""
        return self.shared.tokens if self.shared else self.lengths.row_tokens

    def collated_tokens(self, rows: int) -> int:
        """Tokens of the batch as the collator makes it, padding included: two rows a pair."""
        return rows * (2 if self.shared else 1) * self.lengths.row_tokens

    def answer_tokens(self, rows: int) -> int:
        """Positions in these rows that predict a label: an answer's tokens, its end included."""
        lengths = self.lengths
        if not self.preference:
            return rows * max(lengths.chosen, lengths.rejected, 1)
        pairs = rows if self.shared else rows // 2
        return pairs * max(lengths.chosen + lengths.rejected, 2)

    @property
    def flash_attn(self) -> str:
        """The recipe's, but for Gemma 2's `auto`: LLaMA-Factory then takes FlashAttention-2 where that package is (it
        is not in requirements.txt), and else eager attention (0.9.5 model_utils/attention.py:46-54)."""
        capped = self.model.model_type == "gemma2" and self.recipe.flash_attn == "auto"
        return "disabled" if capped else self.recipe.flash_attn

    @property
    def windowed(self) -> bool:
        """Rows are longer than the window that some layers attend in: sdpa then needs a mask, padding or not
        (transformers 5.5.4 masking_utils.py:263-272)."""
        window = self.model.sliding_window
        return window is not None and self.row_tokens >= window

    @property
    def attention(self) -> Attention:
        """The kernel that runs: `auto` is transformers' default, sdpa; sdpa with a mask is the efficient kernel."""
        kind = self.flash_attn
        if self.shared:
            return "flash"  # two calls without a mask, whatever is padded
        if self.recipe.use_unsloth:
            return "flash"  # in training it drops the mask of rows padded on the right: memory/unsloth.py
        if kind == "disabled":
            return "eager"
        if self.recipe.neat_packing:  # FlashAttention takes their ends from the position ids
            return "flash" if kind in ("fa2", "fa3") else "efficient"
        if kind in ("fa2", "fa3"):
            return "flash_varlen" if self.lengths.padded else "flash"
        return "efficient" if self.lengths.padded or self.windowed else "flash"

    def layer_spec(self, rows: int, trained: bool) -> LayerSpec:
        """How the model computes with `rows` rows outside its layers, and inside with `in_band`; `trained` False for a
        frozen whole reference model."""
        lora = None
        if trained and self.adapters:
            dropout = self.recipe.lora_dropout > 0 and not self.preference  # dpo/trainer.py disables dropout
            lora = Lora(self.recipe.lora_rank, self.lora_targets, self.trained_bytes, dropout, self.recipe.use_dora)
        return LayerSpec(
            model=self.model,
            rows=rows,
            tokens_per_row=self.row_tokens,
            attention=self.attention,
            liger=self.liger,
            trained=self.trained.outside if trained else frozenset(),
            autocast=self.autocast,
            wide_training=self.autocast and self.trained_bytes == FP32,
            lora=lora,
            linears_save_inputs=self.zero_stage == 3,
            quantization=self.quantization if trained else self.reference_quantization,
            wide_norms=self.recipe.upcast_layernorm and trained,
            shared=self.shared,
            tiled=self.on("tiled_mlp"),
            padded=self.lengths.padded,
            packed=self.recipe.neat_packing,
            unsloth=self.recipe.use_unsloth and trained,
        )
