"""Numbers that stand both in the DeepSpeed JSON and in the recipe must agree, or transformers stops.

transformers 5.5.4 integrations/deepspeed.py HfTrainerDeepSpeedConfig.fill_match and trainer_config_finalize.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dpofit.recipe.deepspeed import DeepSpeedConfig
from dpofit.recipe.issue import Issue
from dpofit.recipe.settings import Settings


def deepspeed_mismatches(found: DeepSpeedConfig, settings: Settings) -> Iterator[Issue]:
    """One issue a disagreeing number; a fixed train_batch_size is one when no number of GPUs can give it."""
    for path, expected, key in _pairs(settings):
        value = _at(found.config, path)
        if value not in (None, "auto") and value != expected:
            wrong = f"is {_shown(value)} while the recipe's {key} is {_shown(expected)}"
            yield Issue("config.deepspeed-mismatch", found.source, path, wrong, 'Write "auto" in the DeepSpeed JSON.')
    total = _at(found.config, "train_batch_size")
    per_gpu = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    if isinstance(total, (int, float)) and not isinstance(total, bool):
        if total % per_gpu:
            wrong = f"is {_shown(total)}, no multiple of the {per_gpu} rows of one GPU's step"
            yield Issue("config.deepspeed-mismatch", found.source, "train_batch_size", wrong, 'Write "auto".')
        else:
            wrong = f"is {_shown(total)}: exactly {_shown(total / per_gpu)} GPUs"
            yield Issue(
                "config.deepspeed-batch", found.source, "train_batch_size", wrong, 'Write "auto" for any number.'
            )


def _pairs(s: Settings) -> tuple[tuple[str, Any, str], ...]:
    return (
        ("train_micro_batch_size_per_gpu", s["per_device_train_batch_size"], "per_device_train_batch_size"),
        ("gradient_accumulation_steps", s["gradient_accumulation_steps"], "gradient_accumulation_steps"),
        ("gradient_clipping", s["max_grad_norm"], "max_grad_norm"),
        ("optimizer.params.lr", s["learning_rate"], "learning_rate"),
        ("optimizer.params.betas", [s["adam_beta1"], s["adam_beta2"]], "adam_beta1 and adam_beta2"),
        ("optimizer.params.eps", s["adam_epsilon"], "adam_epsilon"),
        ("optimizer.params.weight_decay", s["weight_decay"], "weight_decay"),
        ("scheduler.params.warmup_max_lr", s["learning_rate"], "learning_rate"),
        ("fp16.enabled", s.on("fp16") or s.on("fp16_full_eval"), "fp16"),
        ("bf16.enabled", s.on("bf16") or s.on("bf16_full_eval"), "bf16"),
    )


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
