"""Turns checked settings into the typed Recipe that the memory model reads."""

from __future__ import annotations

from collections.abc import Mapping

from dpofit.recipe.environment import expandable_segments
from dpofit.recipe.memory_keys import unmodelled_keys
from dpofit.recipe.recipe import Badam, LowRank, Recipe, ZeroConfig
from dpofit.recipe.run import Run
from dpofit.recipe.settings import Settings


def build_recipe(
    settings: Settings,
    name: str,
    zero: ZeroConfig | None,
    environment: Mapping[str, str],
    unmodelled_deepspeed: tuple[str, ...],
    long_context: frozenset[str] = frozenset(),
) -> Recipe:
    """The Recipe of settings whose values have been checked (settings.value_issues found nothing)."""
    s = settings
    checkpointing, reentrant, unsloth_gc = gradient_checkpointing(s)
    run = Run(s, zero)
    return Recipe(
        name=name,
        source=s.document.path,
        settings=dict(s.given),
        model=s["model_name_or_path"],
        stage=s["stage"],
        finetuning=s["finetuning_type"],
        zero=zero,
        environment=dict(environment),
        micro_batch=s["per_device_train_batch_size"],
        eval_micro_batch=s["per_device_eval_batch_size"],
        gradient_accumulation=s["gradient_accumulation_steps"],
        cutoff_len=s["cutoff_len"],
        evaluates=run.do_eval,
        # data_args.py: neat_packing implies packing; parser.py: packing defaults to on in pt only
        packing=s.on("neat_packing") or (s["stage"] == "pt" if s["packing"] is None else s.on("packing")),
        neat_packing=s.on("neat_packing"),
        pref_loss=s["pref_loss"],
        pref_ftx=float(s.number("pref_ftx")),
        ld_alpha=s["ld_alpha"],
        ref_model=s["ref_model"],
        ref_model_adapters=s["ref_model_adapters"],
        ref_model_quantization_bit=s["ref_model_quantization_bit"],
        freeze_layers=s["freeze_trainable_layers"],
        freeze_modules=s.names("freeze_trainable_modules"),
        freeze_extra=s.names("freeze_extra_modules"),
        lora_rank=s["lora_rank"],
        lora_target=s.names("lora_target"),
        lora_dropout=float(s.number("lora_dropout")),
        additional_target=additional_target(s),
        use_dora=s.on("use_dora"),
        use_rslora=s.on("use_rslora"),
        pissa_init=s.on("pissa_init"),
        create_new_adapter=s.on("create_new_adapter"),
        adapters=s["adapter_name_or_path"],
        quantization_bit=s["quantization_bit"],
        quantization_method=s["quantization_method"],
        quantization_type=s["quantization_type"],
        double_quantization=s.on("double_quantization"),
        bf16=s.on("bf16"),
        fp16=s.on("fp16"),
        pure_bf16=s.on("pure_bf16"),
        upcast_layernorm=s.on("upcast_layernorm"),
        upcast_lmhead_output=s.on("upcast_lmhead_output"),
        gradient_checkpointing=checkpointing,
        use_reentrant_gc=reentrant,
        use_unsloth=s.on("use_unsloth"),
        use_unsloth_gc=unsloth_gc,
        liger=s.on("enable_liger_kernel"),
        flash_attn=s["flash_attn"],
        optim=s["optim"],
        weight_decay=float(s.number("weight_decay")),
        low_rank=_low_rank(s),
        badam=_badam(s),
        use_adam_mini=s.on("use_adam_mini"),
        use_muon=s.on("use_muon"),
        shift_attn=s.on("shift_attn"),
        rope_scaling=s["rope_scaling"],
        expandable_segments=expandable_segments(environment),
        torch_empty_cache_steps=s["torch_empty_cache_steps"],
        long_context=long_context,
        save_only_model=s.on("save_only_model"),
        save_total_limit=s["save_total_limit"],
        saves=s["save_strategy"] != "no",
        unmodelled=(*unmodelled_keys(s), *unmodelled_deepspeed),
    )


def _badam(s: Settings) -> Badam | None:
    keys = ("badam_mode", "badam_switch_mode", "badam_start_block", "badam_switch_interval")
    return Badam(*(s[key] for key in keys)) if s.on("use_badam") else None


def _low_rank(s: Settings) -> LowRank | None:
    """GaLore's or APOLLO's settings; a random projection is APOLLO's alone."""
    for kind, random in (("galore", False), ("apollo", s["apollo_proj"] == "random")):
        if s.on(f"use_{kind}"):
            return LowRank(
                kind, s[f"{kind}_rank"], s.names(f"{kind}_target"), s[f"{kind}_proj_type"], random,
                s.on(f"{kind}_layerwise"),
            )  # fmt: skip
    return None


def additional_target(s: Settings) -> tuple[str, ...]:
    """Modules trained whole beside adapters; resize_vocab adds both tables if none are named (model/adapter.py:222)."""
    names = s.names("additional_target")
    if s["finetuning_type"] == "lora" and s.on("resize_vocab") and not names:
        return ("embed_tokens", "lm_head")
    return names


def gradient_checkpointing(s: Settings) -> tuple[bool, bool, bool]:
    """(on, reentrant, unsloth offload) as two layers of code leave it.

    LLaMA-Factory enables it with its own function (model_utils/checkpointing.py 165-178). Then, with
    `gradient_checkpointing: true`, transformers' trainer enables it again with `gradient_checkpointing_kwargs`
    (trainer.py 1376): through LLaMA-Factory's function (kwargs None → reentrant), or, where LLaMA-Factory was told to
    leave it off, through the model's own (kwargs None → non-reentrant, no unsloth offload).
    """
    ours = not s.on("disable_gradient_checkpointing")
    theirs = s.on("gradient_checkpointing")
    kwargs = s["gradient_checkpointing_kwargs"] if theirs else None
    if isinstance(kwargs, str):
        kwargs = None  # JSON text: check asks for a mapping
    asked = kwargs.get("use_reentrant") if kwargs else None
    if not theirs:
        return ours, s.on("use_reentrant_gc"), ours and s.on("use_unsloth_gc")
    reentrant = ours if asked is None else bool(asked)
    return True, reentrant, ours and s.on("use_unsloth_gc")
