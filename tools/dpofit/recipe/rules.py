"""Combinations that LLaMA-Factory or transformers refuses when a run starts.

Modelled from llamafactory 0.9.5 hparams/{parser,model_args,data_args,finetuning_args}.py, model/model_utils/*.py and
transformers 5.5.4 training_args.py (__post_init__, _validate_args). Every rule is tested against the real parser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dpofit.recipe.issue import Issue
from dpofit.recipe.run import Run
from dpofit.recipe.settings import Settings


@dataclass(frozen=True, slots=True)
class Rule:
    """`applies` is true when there is something to say about the run; `key` is the one to point at."""

    id: str
    key: str
    applies: Callable[[Run, Settings], bool]
    wrong: str
    right: str


def broken(rules: Iterable[Rule], run: Run) -> Iterator[Issue]:
    """Those of the rules that apply. Call it only with values of the right types (settings.value_issues)."""
    for rule in rules:
        if rule.applies(run, run.settings):
            yield run.settings.issue(rule.id, rule.key, rule.wrong, rule.right)


def refusals(run: Run) -> Iterator[Issue]:
    """Every combination in the run that LLaMA-Factory or transformers refuses."""
    yield from broken(RULES, run)
    yield from _lora_only(run)


def _lora_only(run: Run) -> Iterator[Issue]:
    """finetuning_args.py 604-615, one issue a key."""
    if run.method != "lora":
        for key in ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init"):
            if run.settings[key] not in (None, False):
                yield run.settings.issue("config.lora-only", key, f"needs LoRA, not {run.method}", "Remove it.")


def _adapters(s: Settings) -> int:
    return 0 if s["adapter_name_or_path"] is None else len(s.names("adapter_name_or_path"))


def _bits(s: Settings) -> bool:
    """Bits the method does not offer (model_utils/quantization.py 157-217)."""
    offered = {"bnb": (4, 8), "hqq": (1, 2, 3, 4, 5, 6, 8), "eetq": (8,)}.get(s["quantization_method"])
    return s["quantization_bit"] is not None and offered is not None and s["quantization_bit"] not in offered


_NOT_UNDER_ZERO3 = {("bnb", 8), ("eetq", 8), *(("hqq", bits) for bits in range(1, 9))}


def _eval_data(s: Settings) -> bool:
    return s.set("eval_dataset") or s.number("val_size") >= 1e-6


def _mixing(s: Settings) -> bool:
    if s["interleave_probs"] is None:
        return False
    count = len(s.names("interleave_probs"))
    named = [len(s.names(key)) for key in ("dataset", "eval_dataset") if s[key] is not None]
    return s["mix_strategy"] == "concat" or any(names != count for names in named)


def _load_best(s: Settings) -> bool:
    """transformers training_args.py _validate_args: strategies match, save_steps a multiple of eval_steps."""
    if not s.on("load_best_model_at_end"):
        return False
    if s.on("save_only_model") and s.set("deepspeed"):  # trainer.py 836-843
        return True
    if s["save_strategy"] == "best":
        return False
    if s["eval_strategy"] != s["save_strategy"]:
        return True
    eval_steps = s["eval_steps"] or s["logging_steps"]
    if s["eval_strategy"] != "steps" or s["save_steps"] % eval_steps == 0:
        return False
    fractions = (eval_steps < 1, s["save_steps"] < 1)
    return fractions != (True, True) or (s["save_steps"] * 1_000_000) % (eval_steps * 1_000_000) != 0


def _bad_steps(s: Settings, strategy: str, key: str) -> bool:
    return s[strategy] == "steps" and s[key] is not None and s[key] > 1 and s[key] != int(s[key])


def _reports_to(s: Settings, name: str) -> bool:
    return name in ([s["report_to"]] if isinstance(s["report_to"], str) else s["report_to"] or ())


# fmt: off
RULES: tuple[Rule, ...] = (
    # hparams/model_args.py
    Rule("config.no-model", "model_name_or_path", lambda r, s: not s.set("model_name_or_path"),
         "is missing", "Name a model or a folder."),
    Rule("config.pixels", "image_max_pixels", lambda r, s: s["image_max_pixels"] < s["image_min_pixels"],
         "is below image_min_pixels", "Raise it."),
    Rule("config.pixels", "video_max_pixels", lambda r, s: s["video_max_pixels"] < s["video_min_pixels"],
         "is below video_min_pixels", "Raise it."),
    Rule("config.export-dataset", "export_quantization_bit",
         lambda r, s: s.set("export_quantization_bit") and not s.set("export_quantization_dataset"),
         "has no data to calibrate on", "Set export_quantization_dataset."),
    # hparams/data_args.py
    Rule("config.eval-data-twice", "val_size", lambda r, s: s.number("val_size") > 1e-6 and not s.set("dataset"),
         "has no dataset to split", "Set dataset, or remove val_size."),
    Rule("config.eval-data-twice", "val_size", lambda r, s: s.number("val_size") > 1e-6 and s.set("eval_dataset"),
         "stands next to eval_dataset", "Keep one of the two."),
    Rule("config.mixing", "interleave_probs", lambda r, s: _mixing(s),
         "does not fit mix_strategy or the number of datasets",
         "Set mix_strategy: interleave_under and one number for each dataset."),
    Rule("config.streaming", "val_size", lambda r, s: s.on("streaming") and 1e-6 < s.number("val_size") < 1,
         "is a fraction of a stream", "Give a number of rows."),
    Rule("config.streaming", "max_samples", lambda r, s: s.on("streaming") and s.set("max_samples"),
         "cannot cut a stream", "Remove it."),
    Rule("config.streaming", "max_steps", lambda r, s: s.on("streaming") and s["max_steps"] == -1,
         "is missing while streaming", "Set max_steps."),
    Rule("config.mask-history", "mask_history", lambda r, s: s.on("mask_history") and s.on("train_on_prompt"),
         "excludes train_on_prompt", "Keep one of the two."),
    # hparams/finetuning_args.py
    Rule("config.reference-bits", "ref_model_quantization_bit",
         lambda r, s: s["ref_model_quantization_bit"] not in (None, 4, 8),
         "is neither 4 nor 8", "Choose 4 or 8."),
    Rule("config.reference-bits", "reward_model_quantization_bit",
         lambda r, s: s["reward_model_quantization_bit"] not in (None, 4, 8),
         "is neither 4 nor 8", "Choose 4 or 8."),
    Rule("config.reward-model", "reward_model", lambda r, s: r.stage == "ppo" and not s.set("reward_model"),
         "is missing for ppo", "Name a reward model."),
    Rule("config.reward-model", "reward_model_type",
         lambda r, s: r.stage == "ppo" and s["reward_model_type"] == "lora" and r.method != "lora",
         "is lora while finetuning_type is not", "Set reward_model_type: full."),
    Rule("config.label-smoothing-loss", "dpo_label_smoothing",
         lambda r, s: r.stage == "dpo" and s["pref_loss"] != "sigmoid" and s.number("dpo_label_smoothing") > 1e-6,
         "needs the sigmoid loss", "Set it to 0, or pref_loss: sigmoid."),
    Rule("config.llama-pro-full", "use_llama_pro", lambda r, s: s.on("use_llama_pro") and r.method == "full",
         "needs freeze or lora", "Remove it."),
    Rule("config.block-optimizer", "finetuning_type",
         lambda r, s: r.method == "lora" and any(map(s.on, ("use_galore", "use_apollo", "use_badam"))),
         "is lora next to GaLore, APOLLO or BAdam", "Set finetuning_type: full."),
    Rule("config.block-optimizer", "use_galore",
         lambda r, s: sum(map(s.on, ("use_galore", "use_apollo", "use_badam"))) > 1,
         "is one of several block optimizers", "Keep one."),
    Rule("config.block-optimizer", "deepspeed",
         lambda r, s: s.set("deepspeed") and (s.on("use_galore") or s.on("use_apollo")),
         "excludes GaLore and APOLLO", "Remove one of the two."),
    Rule("config.pissa-stage", "pissa_init",
         lambda r, s: s.on("pissa_init") and (r.stage in ("ppo", "kto") or r.uses_reference),
         "is refused at this stage", "Remove it, or use pref_loss: orpo or simpo."),
    # hparams/parser.py get_train_args
    Rule("config.sft-only", "predict_with_generate", lambda r, s: r.stage != "sft" and s.on("predict_with_generate"),
         "is for sft", "Remove it."),
    Rule("config.sft-only", "neat_packing", lambda r, s: r.stage != "sft" and s.on("neat_packing"),
         "is for sft", "Remove it."),
    Rule("config.sft-only", "train_on_prompt", lambda r, s: r.stage != "sft" and s.on("train_on_prompt"),
         "is for sft", "Remove it."),
    Rule("config.sft-only", "mask_history", lambda r, s: r.stage != "sft" and s.on("mask_history"),
         "is for sft", "Remove it."),
    Rule("config.predict-with-generate", "do_predict",
         lambda r, s: r.stage == "sft" and s.on("do_predict") and not s.on("predict_with_generate"),
         "needs predict_with_generate", "Set predict_with_generate: true."),
    Rule("config.predict-with-generate", "predict_with_generate",
         lambda r, s: s.on("predict_with_generate") and r.zero3,
         "excludes ZeRO-3", "Predict without DeepSpeed, or at stage 2."),
    Rule("config.predict-with-generate", "predict_with_generate",
         lambda r, s: s.on("predict_with_generate") and s.on("compute_accuracy"),
         "excludes compute_accuracy", "Keep one of the two."),
    Rule("config.load-best", "load_best_model_at_end",
         lambda r, s: r.stage in ("rm", "ppo") and s.on("load_best_model_at_end"),
         "is refused for rm and ppo", "Remove it."),
    Rule("config.ppo", "do_train", lambda r, s: r.stage == "ppo" and not s.on("do_train"),
         "is false, and ppo only trains", "Set do_train: true."),
    Rule("config.ppo", "shift_attn", lambda r, s: r.stage == "ppo" and s.on("shift_attn"),
         "excludes ppo", "Remove it."),
    Rule("config.no-dataset", "dataset", lambda r, s: s.on("do_train") and not s.set("dataset"),
         "is missing", "Name the datasets of dataset_info.json to train on."),
    Rule("config.no-eval-data", "eval_strategy",
         lambda r, s: not _eval_data(s) and (r.do_eval or s.on("do_predict") or s.on("predict_with_generate")),
         "asks for evaluation without data", "Set eval_dataset or val_size, or eval_strategy: \"no\"."),
    Rule("config.quantization-device-map", "quantization_device_map",
         lambda r, s: s.on("do_train") and s["quantization_device_map"] == "auto",
         "is for inference", "Remove it."),
    Rule("config.pissa-zero3", "pissa_init", lambda r, s: s.on("pissa_init") and r.zero3,
         "is refused under ZeRO-3", "Initialise with LLaMA-Factory's scripts/pissa_init.py."),
    Rule("config.pure-bf16-zero3", "pure_bf16", lambda r, s: s.on("pure_bf16") and r.zero3,
         "is refused under ZeRO-3", "Write bf16: true instead."),
    Rule("config.quantization-fp8", "fp8", lambda r, s: s.on("fp8") and r.quantized,
         "excludes quantization_bit", "Keep one of the two."),
    Rule("config.inference-backend", "infer_backend", lambda r, s: s["infer_backend"] != "huggingface",
         "is for inference", "Remove it."),
    Rule("config.unsloth-zero3", "use_unsloth", lambda r, s: s.on("use_unsloth") and r.zero3,
         "is refused under ZeRO-3", "Use use_unsloth_gc: true, or ZeRO-2."),
    Rule("config.kt-zero3", "use_kt", lambda r, s: s.on("use_kt") and r.zero3,
         "is refused under ZeRO-3", "Remove deepspeed."),
    Rule("config.trackio-project", "project", lambda r, s: _reports_to(s, "trackio") and not s["project"],
         "is empty while reporting to trackio", "Name a project."),
    # hparams/parser.py _verify_model_args
    Rule("config.adapter-method", "adapter_name_or_path", lambda r, s: _adapters(s) > 0 and r.method != "lora",
         "needs LoRA", "Set finetuning_type: lora, or merge the adapter."),
    Rule("config.quantization-method", "quantization_bit",
         lambda r, s: r.quantized and r.method not in ("lora", "oft"),
         "needs LoRA or OFT", "Set finetuning_type: lora, or remove quantization_bit."),
    Rule("config.pissa-quantized", "pissa_init", lambda r, s: r.quantized and s.on("pissa_init"),
         "is refused on a quantized model", "Initialise with LLaMA-Factory's scripts/pissa_init.py."),
    Rule("config.quantization-vocab", "resize_vocab", lambda r, s: r.quantized and s.on("resize_vocab"),
         "is refused on a quantized model", "Remove it."),
    Rule("config.quantization-adapter", "create_new_adapter",
         lambda r, s: r.quantized and _adapters(s) > 0 and s.on("create_new_adapter"),
         "is refused on a quantized model", "Remove it, or merge the first adapter."),
    Rule("config.quantization-adapter", "adapter_name_or_path", lambda r, s: r.quantized and _adapters(s) > 1,
         "names several adapters", "Merge them first."),
    # model/model_utils
    Rule("config.quantization-bits", "quantization_bit", lambda r, s: _bits(s),
         "is not offered by this quantization_method", "bnb: 4 or 8; hqq: 1-6 or 8; eetq: 8."),
    Rule("config.quantization-zero3", "quantization_bit",
         lambda r, s: r.zero3 and (s["quantization_method"], s["quantization_bit"]) in _NOT_UNDER_ZERO3,
         "is refused under ZeRO-3", "Use 4-bit bnb, or ZeRO-2."),
    Rule("config.flash-attn-fa3", "flash_attn",
         lambda r, s: s["flash_attn"] == "fa3" and "gpt-oss" not in str(s["model_name_or_path"]).lower(),
         "is fa3", "Write fa2, sdpa or auto."),
    # transformers training_args.py
    Rule("config.auto-batch-zero3", "auto_find_batch_size", lambda r, s: s.on("auto_find_batch_size") and r.zero3,
         "is refused under ZeRO-3", "Set per_device_train_batch_size."),
    Rule("config.precision-twice", "fp16", lambda r, s: s.on("fp16") and s.on("bf16"),
         "excludes bf16", "Keep bf16."),
    Rule("config.precision-twice", "fp16_full_eval", lambda r, s: s.on("fp16_full_eval") and s.on("bf16_full_eval"),
         "excludes bf16_full_eval", "Keep one of the two."),
    Rule("config.load-best", "load_best_model_at_end", lambda r, s: _load_best(s),
         "does not fit how checkpoints are saved",
         "Give save_strategy and eval_strategy the same value and save_steps a multiple of eval_steps."),
    Rule("config.scheduler-needs-eval", "lr_scheduler_type",
         lambda r, s: s["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy") and s["eval_strategy"] == "no",
         "needs evaluations", "Set eval_strategy, or another schedule."),
    Rule("config.steps", "logging_steps", lambda r, s: s["logging_strategy"] == "steps" and s["logging_steps"] == 0,
         "is 0", "Give 1 or more."),
    Rule("config.steps", "logging_steps", lambda r, s: _bad_steps(s, "logging_strategy", "logging_steps"),
         "is a fraction above 1", "Give a whole number."),
    Rule("config.steps", "eval_steps", lambda r, s: _bad_steps(s, "eval_strategy", "eval_steps"),
         "is a fraction above 1", "Give a whole number."),
    Rule("config.steps", "save_steps", lambda r, s: _bad_steps(s, "save_strategy", "save_steps"),
         "is a fraction above 1", "Give a whole number."),
    Rule("config.steps", "torch_empty_cache_steps",
         lambda r, s: s.set("torch_empty_cache_steps") and s["torch_empty_cache_steps"] <= 0,
         "is not above 0", "Give 1 or more."),
    Rule("config.steps", "warmup_steps",
         lambda r, s: s.number("warmup_ratio" if s.set("warmup_ratio") else "warmup_steps") < 0,
         "is negative", "Give 0 or more."),
    Rule("config.prefetch-without-workers", "dataloader_prefetch_factor",
         lambda r, s: s.set("dataloader_prefetch_factor") and s["dataloader_num_workers"] == 0,
         "needs data workers", "Set dataloader_num_workers, or remove it."),
)
# fmt: on
