"""What a smoke run changes in a recipe, each change with its reason, and the first loss it must then show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.launch.smoke_model import VOCABULARY
from dpofit.recipe.recipe import Recipe

STEPS, SAVE_STEPS = 3, 2
MAX_ACCUMULATION = 2
LEARNING_RATE = 1e-3
_DATASETS = {
    "dpo": "smoke_pairs",
    "rm": "smoke_pairs",
    "kto": "smoke_labelled",
    "sft": "smoke_answers",
    "pt": "smoke_texts",
}
_SECRET_KEYS = ("hub_token", "hf_hub_token", "ms_hub_token", "om_hub_token", "swanlab_api_key", "swanlab_lark_secret")


@dataclass(frozen=True, slots=True)
class Replacement:
    """One key whose value a smoke run changes; `was` and `now` are the values, None for absent."""

    key: str
    was: Any
    now: Any
    why: str


@dataclass(frozen=True, slots=True)
class SmokePlan:
    """The settings of a smoke run, what was replaced, the first loss (None where no value is known), why no run can
    go on from its checkpoints (None where one can)."""

    settings: Mapping[str, Any]
    replaced: tuple[Replacement, ...]
    first_loss: float | None
    first_loss_why: str
    head_scale: float
    no_resume: str | None


def smoke_plan(
    recipe: Recipe, deepspeed: Mapping[str, Any] | None, folder: Path, gpus: int, bitsandbytes: bool
) -> SmokePlan:
    """The plan for `recipe`, to run under `folder`; `gpus` 0 replaces what a CPU can't run by an equivalent.

    BadInput for what can't be run here at all, by name.
    """
    _refuse(recipe, gpus, bitsandbytes)
    settings = dict(recipe.settings)
    replaced: list[Replacement] = []

    def put(key: str, value: Any, why: str, default: Any = None) -> None:
        was = settings.get(key, default)
        if was == value:
            if value is not None:
                settings[key] = value  # write defaults out: the run must not depend on them
            return
        replaced.append(Replacement(key, was, value, why))
        if "." in key:  # inside the DeepSpeed config, changed by the caller
            return
        if value is None:
            settings.pop(key, None)
        else:
            settings[key] = value

    model, local, offline = str(folder / "model"), "a tiny model of the same architecture", "nothing from the network"
    put("model_name_or_path", model, local)
    for key in ("ref_model", "reward_model"):
        if settings.get(key):
            put(key, model, "the same tiny model")
    for key in ("adapter_name_or_path", "ref_model_adapters", "reward_model_adapters", "model_revision", "cache_dir"):
        put(key, None, "belongs to the real model")
    put("output_dir", str(folder / "output"), "nothing of yours is touched")
    put("dataset", _DATASETS[recipe.stage], "pairs shipped with dpofit")
    if settings.get("eval_dataset"):
        put("eval_dataset", _DATASETS[recipe.stage], "pairs shipped with dpofit")
    put("dataset_dir", str(folder / "data"), "pairs shipped with dpofit")
    for key in ("tokenized_path", "media_dir", "max_samples", "mix_strategy", "interleave_probs", "streaming"):
        put(key, None, "belongs to the real dataset")
    put("preprocessing_num_workers", None, "24 rows")
    put("dataloader_num_workers", None, "24 rows")
    put("dataloader_prefetch_factor", None, "24 rows")
    put("dataloader_persistent_workers", None, "24 rows")
    for key in ("resume_from_checkpoint", "overwrite_output_dir"):
        put(key, None, "a fresh folder")
    for key in ("push_to_hub", "trust_remote_code", "use_swanlab"):
        put(key, False, offline, default=False)
    put("report_to", "none", offline)
    for key in _SECRET_KEYS:
        put(key, None, "secrets stay out")
    put("learning_rate", LEARNING_RATE, "3 steps must move bf16 weights")
    put("plot_loss", False, "3 steps make no curve", default=False)
    put("num_train_epochs", None, f"{STEPS} steps")
    put("max_steps", STEPS, "enough to save, resume and save again")
    put("logging_strategy", None, "every step's loss is looked at")
    put("logging_steps", 1, "every step's loss is looked at")
    if settings.get("save_strategy") != "best":
        put("save_strategy", "steps", "a checkpoint to resume from", default="steps")
    put("save_steps", SAVE_STEPS, "a checkpoint to resume from")
    if recipe.evaluates and settings.get("eval_strategy") == "steps":
        put("eval_steps", SAVE_STEPS, "one evaluation")
    if recipe.gradient_accumulation > MAX_ACCUMULATION:
        put("gradient_accumulation_steps", MAX_ACCUMULATION, "accumulates, in less time")
    config = dict(deepspeed) if deepspeed is not None else None
    if gpus == 0:
        config = _for_cpu(put, settings, config, bitsandbytes)
    if config is not None:
        settings["deepspeed"] = config
    loss, why, head_scale = first_loss(recipe)
    return SmokePlan(settings, tuple(replaced), loss, why, head_scale, _no_resume(recipe))


def _no_resume(recipe: Recipe) -> str | None:
    if recipe.save_only_model:
        return "save_only_model keeps no optimizer states"
    if recipe.badam is not None:  # badam 1.4 block_optim.py:93, 209: its state is the optimizer's of one turn
        return "a checkpoint of BAdam holds neither whose turn it is nor the fp32 weights of the layer in training"
    return None


def first_loss(recipe: Recipe) -> tuple[float | None, str, float]:
    """`(loss, formula, factor on the output head)` of a random model's first step.

    With a reference model, policy and reference are the same function and every margin is 0. Without one the head is
    scaled down, so that every token's log-probability is −ln V to three digits.
    """
    s, beta = recipe.settings, float(recipe.settings.get("pref_beta", 0.1))
    log_v = math.log(VOCABULARY)
    if recipe.stage in ("sft", "pt"):
        return log_v, f"ln {VOCABULARY}: every token equally likely", 0.01
    if recipe.stage == "kto":
        if float(s.get("kto_chosen_weight", 1.0)) == float(s.get("kto_rejected_weight", 1.0)) == 1.0:
            return 0.5, "1 − σ(0): policy = reference", 1.0
        return None, "depends on the mix of labels", 1.0
    if recipe.stage == "rm":
        return None, "the value head is random", 1.0
    gamma = float(s.get("simpo_gamma", 0.5))
    losses = {
        "sigmoid": (math.log(2), "ln 2: policy = reference"),
        "hinge": (1.0, "1: policy = reference"),
        "ipo": ((1 / (2 * beta)) ** 2, "(1 / 2β)²: policy = reference"),
        "simpo": (math.log1p(math.exp(gamma)), "−ln σ(−γ): equal log-probabilities"),
        "orpo": (log_v + beta * math.log(2), f"ln {VOCABULARY} + β ln 2: equal log-probabilities"),
    }
    if recipe.pref_loss not in losses:
        return None, f"no value known for {recipe.pref_loss}", 1.0
    loss, why = losses[recipe.pref_loss]
    scale = 0.01 if recipe.pref_loss in ("simpo", "orpo") else 1.0
    if (bco := float(s.get("pref_bco_weight", 0.0))) > 1e-6 and scale == 1.0:
        loss, why = (loss + 2 * math.log(2) * bco) / (1 + bco), f"{why}; BCO 2 ln 2"
    if recipe.pref_ftx > 1e-6:
        loss, why, scale = loss + recipe.pref_ftx * log_v, f"{why}, + pref_ftx ln {VOCABULARY}", 0.01
    return loss, why, scale


def _refuse(recipe: Recipe, gpus: int, bitsandbytes: bool) -> None:
    problems = []
    where = str(recipe.source)
    if recipe.stage not in _DATASETS:
        right = f"Smoke runs cover {', '.join(_DATASETS)}."
        problems.append(Problem(where, "stage", f"{recipe.stage} has no smoke run", right))
    if recipe.quantization_bit is not None and not bitsandbytes:
        wrong = "needs bitsandbytes, which is not installed here"
        right = "Install it, or smoke-launch with quantization_bit=null to check everything else."
        problems.append(Problem(where, "quantization_bit", wrong, right))
    for key in ("use_galore", "use_apollo", "use_adam_mini", "use_muon", "use_kt", "use_mca"):
        if gpus == 0 and recipe.settings.get(key):
            problems.append(Problem(where, key, "has no CPU equivalent here", f"Smoke-launch with {key}=false."))
    if gpus == 0 and recipe.settings.get("fsdp"):
        problems.append(Problem(where, "fsdp", "has no smoke run", "Smoke runs cover DeepSpeed and DDP."))
    if problems:
        raise BadInput(problems)


def _for_cpu(put: Any, settings: Mapping[str, Any], config: dict[str, Any] | None, bitsandbytes: bool) -> Any:
    """What a CPU can't run, replaced by what computes the same."""
    if settings.get("fp16"):
        put("fp16", None, "CPUs train in bf16")
        put("bf16", True, "CPUs train in bf16")
    if settings.get("flash_attn") in ("fa2", "fa3"):
        put("flash_attn", "sdpa", "flash-attn's kernels are CUDA; torch's attention computes the same")
    if settings.get("enable_liger_kernel"):
        put("enable_liger_kernel", False, "Liger's Triton kernels are for GPUs; plain PyTorch computes the same")
    if settings.get("use_unsloth"):
        put("use_unsloth", False, "unsloth's kernels are for GPUs; plain PyTorch computes the same")
    for key in ("tf32", "torch_compile", "fp8"):
        if settings.get(key):
            put(key, None, "for GPUs")
    optim = str(settings.get("optim", ""))
    if ("8bit" in optim or "paged" in optim) and not bitsandbytes:
        put("optim", "adamw_torch", "bitsandbytes is not installed; the same update in 32 bits")
    if config is None:
        return None
    zero = dict(config.get("zero_optimization") or {})
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), Mapping) and zero[key].get("device") == "nvme":
            put(f"deepspeed.{key}.device", "cpu", "no NVMe needed", default="nvme")
            zero[key] = {"device": "cpu", "pin_memory": zero[key].get("pin_memory", False)}
    if settings.get("bf16") and isinstance(config.get("fp16"), Mapping) and config["fp16"].get("enabled") is True:
        put("deepspeed.fp16.enabled", False, "CPUs train in bf16", default=True)
        config["fp16"] = {**config["fp16"], "enabled": False}
        config["bf16"] = {"enabled": "auto"}
    config["zero_optimization"] = zero
    return config
