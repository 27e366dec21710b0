"""What `check` says of settings that run, but not as their writer thinks."""

from __future__ import annotations

from collections.abc import Iterator

from dpofit.recipe.interpolation import has_interpolation
from dpofit.recipe.issue import Issue
from dpofit.recipe.rules import Rule, broken
from dpofit.recipe.run import Run
from dpofit.recipe.secrets import is_secret
from dpofit.recipe.settings import Settings

_QUANTIZES_ON_THE_FLY = ("bnb", "hqq", "eetq")
_OPTIMS = {  # train/trainer_utils.py _create_galore_optimizer, _create_apollo_optimizer
    "use_galore": ("adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adafactor"),
    "use_apollo": ("adamw_torch",),
}
_LORA_KEYS = ("lora_rank", "lora_alpha", "lora_target", "lora_dropout", "additional_target")
_PREFERENCE_KEYS = ("pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "dpo_label_smoothing", "ld_alpha")


def _theirs(s: Settings) -> bool:
    """transformers' own gradient_checkpointing switch, next to LLaMA-Factory's being on."""
    return s.on("gradient_checkpointing") and not s.on("disable_gradient_checkpointing")


# fmt: off
ADVICE: tuple[Rule, ...] = (
    Rule("config.gradient-checkpointing-on", "gradient_checkpointing",
         lambda r, s: _theirs(s) and s.on("use_reentrant_gc"),
         "changes nothing", "Remove it."),
    Rule("config.gradient-checkpointing-reentrant", "gradient_checkpointing",
         lambda r, s: _theirs(s) and not s.on("use_reentrant_gc") and not s["gradient_checkpointing_kwargs"],
         "undoes use_reentrant_gc: false", "Remove it."),
    Rule("config.gradient-checkpointing-back", "gradient_checkpointing",
         lambda r, s: s.on("gradient_checkpointing") and s.on("disable_gradient_checkpointing"),
         "turns on what disable_gradient_checkpointing turns off", "Keep one of the two."),
    Rule("config.gradient-checkpointing-kwargs", "gradient_checkpointing_kwargs",
         lambda r, s: bool(s["gradient_checkpointing_kwargs"]) and not s.on("gradient_checkpointing"),
         "is not read", "Use use_reentrant_gc."),
    Rule("config.unsloth-gc-off", "use_unsloth_gc",
         lambda r, s: s.on("use_unsloth_gc") and s.on("disable_gradient_checkpointing"),
         "does nothing with checkpointing disabled", "Remove disable_gradient_checkpointing."),
    Rule("config.unsloth-is-not-unsloth-gc", "use_unsloth",
         lambda r, s: s.on("use_unsloth") and not s.on("use_unsloth_gc"),
         "is not use_unsloth_gc", "For checkpoint offload alone write use_unsloth_gc: true."),
    Rule("config.unsloth-cutoff", "cutoff_len",
         lambda r, s: s.on("use_unsloth") and r.stage == "dpo" and s["cutoff_len"] % 8,
         "is no multiple of 8: unsloth cuts what padding adds", "Round it to a multiple of 8."),
    Rule("config.liger-no-fused-loss", "enable_liger_kernel",
         lambda r, s: s.on("enable_liger_kernel") and r.stage not in ("pt", "sft"),
         "does not shrink the logits here", "Keep it for the layers; plan memory with the whole logits."),
    Rule("config.liger-twice", "use_liger_kernel", lambda r, s: s.on("use_liger_kernel"),
         "is not LLaMA-Factory's switch", "Write enable_liger_kernel: true."),
    Rule("config.eval-batch-default", "eval_strategy",
         lambda r, s: r.stage == "dpo" and r.do_eval and "per_device_eval_batch_size" not in s,
         "evaluates 8 pairs at once", "Set per_device_eval_batch_size: 1."),
    Rule("config.eval-data-unused", "val_size",
         lambda r, s: not (r.do_eval or s.on("do_predict")) and (s.set("eval_dataset") or s.number("val_size") > 1e-6),
         "gives evaluation data that nothing uses", "Set eval_strategy: steps, or remove it."),
    Rule("config.train-batch-default", "per_device_train_batch_size",
         lambda r, s: r.stage == "dpo" and s.on("do_train") and "per_device_train_batch_size" not in s,
         "is not set: 8 pairs at once", "Set per_device_train_batch_size: 1."),
    Rule("config.no-do-train", "do_train", lambda r, s: not s.on("do_train") and not s.on("do_predict"),
         "is not true", "Set do_train: true to train."),
    Rule("config.no-precision", "bf16",
         lambda r, s: s.on("do_train") and not any(map(s.on, ("bf16", "fp16", "pure_bf16"))),
         "is off, and so are fp16 and pure_bf16", "Set bf16: true."),
    Rule("config.fp16-dpo", "fp16", lambda r, s: s.on("fp16") and r.stage == "dpo",
         "is on in dpo", "Set bf16: true where the GPU has it."),
    Rule("config.no-cutoff", "cutoff_len", lambda r, s: s.on("do_train") and "cutoff_len" not in s,
         "is not set: 2,048", "Set it to your longest prompt plus answer."),
    Rule("config.packing-dpo", "packing", lambda r, s: r.stage == "dpo" and s.on("packing"),
         "does nothing in dpo", "Remove it."),
    Rule("config.pref-ftx", "pref_ftx", lambda r, s: r.stage == "dpo" and s.number("pref_ftx") > 1e-6,
         "adds an sft loss", "Set it to 0 for plain dpo."),
    Rule("config.lora-dropout-dpo", "lora_dropout", lambda r, s: r.stage == "dpo" and s.number("lora_dropout") > 0,
         "is turned off by dpo", "Remove it."),
    Rule("config.pref-loss-ignored", "pref_loss",
         lambda r, s: r.stage == "dpo" and s["pref_loss"] in ("hinge", "ipo", "kto_pair"),
         "trains as sigmoid with the pinned trl 0.24", "Use sigmoid, orpo or simpo, or another trl."),
    Rule("config.reference-ignored", "ref_model",
         lambda r, s: r.stage == "dpo" and not r.uses_reference and s.set("ref_model"),
         "is not used by this pref_loss", "Remove it."),
    Rule("config.many-checkpoints", "save_total_limit",
         lambda r, s: s.on("do_train") and s["save_strategy"] != "no" and not s.set("save_total_limit"),
         "is not set: every checkpoint stays", "Set save_total_limit, and save_only_model: true if you never resume."),
    Rule("config.quantization-not-applied", "quantization_method",
         lambda r, s: r.quantized and s["quantization_method"] not in _QUANTIZES_ON_THE_FLY,
         "does not quantize while loading",
         "Use bnb, or name a model that is stored quantized and remove quantization_bit."),
    Rule("config.zero3-qlora", "quantization_bit", lambda r, s: r.quantized and r.zero3,
         "is used under ZeRO-3", "Make sure the whole quantized model fits one GPU, or use ZeRO-2 or none."),
    Rule("config.badam-distributed", "use_badam",
         lambda r, s: s.on("use_badam") and (s["badam_mode"] == "ratio" or not r.zero3),
         "runs on one GPU only like this", "Use badam_mode: layer with ZeRO-3."),
    Rule("config.optim-of-block-optimizer", "optim",
         lambda r, s: any(s.on(key) and s["optim"] not in optims for key, optims in _OPTIMS.items()),
         "is none that GaLore or APOLLO goes with", "Set optim: adamw_torch."),
    Rule("config.layerwise-distributed", "use_galore",
         lambda r, s: any(s.on(f"use_{kind}") and s.on(f"{kind}_layerwise") for kind in ("galore", "apollo")),
         "or APOLLO layer by layer runs on one GPU only", "Turn it off on several."),
    Rule("config.own-optimizer-deepspeed", "deepspeed",
         lambda r, s: s.set("deepspeed") and (s.on("use_muon") or s.on("use_adam_mini")),
         "is more than Muon and Adam-mini can do", "Remove one of the two."),
    Rule("config.shift-attn", "shift_attn",
         lambda r, s: s.on("shift_attn") and "llama" in str(s["model_name_or_path"]).lower(),
         "stops Llama models with the pinned transformers", "Remove it."),
)
# fmt: on


def settings_advice(run: Run) -> Iterator[Issue]:
    """Remarks that follow from the settings alone."""
    yield from broken(ADVICE, run)
    s = run.settings
    if run.method not in ("lora", "oft"):
        for key in _LORA_KEYS:
            if key in s and s.set(key):
                yield s.issue(
                    "config.lora-keys-full", key, f"does nothing with finetuning_type: {run.method}", "Remove it."
                )
    if run.stage not in ("dpo", "kto"):
        for key in _PREFERENCE_KEYS:
            if key in s:
                yield s.issue("config.pref-keys-stage", key, f"does nothing with stage: {run.stage}", "Remove it.")
    for key in s.given:
        if is_secret(key) and s[key] and key not in s.overridden and not has_interpolation(s.document.values[key]):
            right = f"Export it in the shell, or write ${{oc.env:{key.upper()}}}, which dpofit resolves."
            yield s.issue("config.secret-in-file", key, "holds a secret", right)
