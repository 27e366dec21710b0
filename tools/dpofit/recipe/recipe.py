"""A resolved recipe: one LLaMA-Factory configuration, typed, with its DeepSpeed config beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Auto = Literal["auto"]
Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """The memory-relevant part of a DeepSpeed JSON. Absent keys hold DeepSpeed's defaults; `auto` stays `auto`
    (accelerate fills it from the model's hidden size: memory/zero.py)."""

    source: str  # file it was read from
    stage: int  # 0..3
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
    optimizer_pin_memory: bool = False
    param_pin_memory: bool = False
    overlap_comm: bool = False  # DeepSpeed: default False below stage 3, True at stage 3
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int | Auto = 500_000_000
    allgather_bucket_size: int | Auto = 500_000_000
    prefetch_bucket_size: int | Auto = 50_000_000
    param_persistence_threshold: int | Auto = 100_000
    max_live_parameters: int | Auto = 1_000_000_000
    max_reuse_distance: int | Auto = 1_000_000_000
    sub_group_size: int | Auto = 1_000_000_000
    gather_16bit_weights_on_save: bool = False
    round_robin_gradients: bool = False
    grad_accum_dtype: str | None = None  # data_types.grad_accum_dtype
    other_keys: tuple[str, ...] = ()  # dotted keys present that the memory model does not read


@dataclass(frozen=True, slots=True)
class LowRank:
    """use_galore or use_apollo: moments of gradients projected to `rank`. Of one process, without DeepSpeed."""

    kind: str  # galore, apollo
    rank: int
    targets: tuple[str, ...]  # pieces of module names; `all` is every linear layer but the head
    projection: str  # std, reverse_std, right, left, full
    random: bool  # apollo_proj: a random matrix, else singular vectors
    layerwise: bool  # updated inside backward, each gradient freed at once


@dataclass(frozen=True, slots=True)
class Badam:
    """use_badam: a block of layers at a time (layer), or a share of each matrix (ratio)."""

    mode: str  # layer, ratio
    switch_mode: str  # ascending, descending, random, fixed: which block comes next
    start_block: int | None = None
    switch_interval: int | None = 50  # steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """A LLaMA-Factory run as its own parser would see it, defaults filled in.

    `settings` is the whole flat mapping after overrides (what `launch` writes and `diff` compares); the typed
    fields below are what the memory model reads. Defaults are those of LLaMA-Factory 0.9.5 / transformers 5.5.4.
    """

    name: str  # catalogue name or file stem
    source: Path
    settings: Mapping[str, Any]
    model: str  # model_name_or_path
    stage: str = "sft"  # dpo, kto, rm, sft; others are refused by memory/scope.py
    finetuning: str = "lora"  # finetuning_type: full, freeze, lora (others refused)
    zero: ZeroConfig | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # from card / dpofit.yaml / process, allow-listed

    # batch and lengths
    micro_batch: int = 8  # per_device_train_batch_size
    eval_micro_batch: int = 8
    gradient_accumulation: int = 1
    cutoff_len: int = 2048
    evaluates: bool = False  # do_eval, eval_strategy, val_size or eval_dataset ask for it
    packing: bool = False
    neat_packing: bool = False

    # preference
    pref_loss: str = "sigmoid"
    pref_ftx: float = 0.0
    ld_alpha: float | None = None
    ref_model: str | None = None
    ref_model_adapters: str | None = None
    ref_model_quantization_bit: int | None = None

    # freeze tuning
    freeze_layers: int = 2  # freeze_trainable_layers: the last ones, or the first when negative
    freeze_modules: tuple[str, ...] = ("all",)  # freeze_trainable_modules, of those layers
    freeze_extra: tuple[str, ...] = ()  # freeze_extra_modules, outside the layers

    # adapters
    lora_rank: int = 8
    lora_target: tuple[str, ...] = ("all",)
    lora_dropout: float = 0.0
    additional_target: tuple[str, ...] = ()
    use_dora: bool = False
    use_rslora: bool = False
    pissa_init: bool = False
    create_new_adapter: bool = False
    adapters: str | None = None  # adapter_name_or_path

    # quantization
    quantization_bit: int | None = None
    quantization_method: str = "bnb"
    quantization_type: str = "nf4"
    double_quantization: bool = True

    # precision
    bf16: bool = False
    fp16: bool = False
    pure_bf16: bool = False
    upcast_layernorm: bool = False
    upcast_lmhead_output: bool = False

    # memory knobs
    gradient_checkpointing: bool = True  # not disable_gradient_checkpointing
    use_reentrant_gc: bool = True
    use_unsloth: bool = False
    use_unsloth_gc: bool = False
    liger: bool = False  # enable_liger_kernel
    flash_attn: str = "auto"  # auto, disabled (eager), sdpa, fa2, fa3
    optim: str = "adamw_torch"
    weight_decay: float = 0.0
    low_rank: LowRank | None = None
    badam: Badam | None = None
    use_adam_mini: bool = False
    use_muon: bool = False
    shift_attn: bool = False
    rope_scaling: str | None = None  # LLaMA-Factory raises the model's positions to cutoff_len (model_utils/rope.py)
    expandable_segments: bool | None = None  # None: what LLaMA-Factory's launcher does (True unless OPTIM_TORCH=0)
    torch_empty_cache_steps: int | None = None

    # computed otherwise than stock, with the same result: names of recipe/long_context.py PIECES
    long_context: frozenset[str] = frozenset()

    # saving
    save_only_model: bool = False
    save_total_limit: int | None = None
    saves: bool = True  # save_strategy is not "no"

    # keys present, not at their default, that change memory in a way not listed above: refused by memory/scope.py
    unmodelled: tuple[str, ...] = ()
