"""`shared_prompt`: a pair runs as one row, prompt, chosen, rejected, so the prompt's states are computed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask

from dpofit.errors import Problem
from dpofit.train.hooks import Hook
from dpofit.train.longdpo import OWNER
from dpofit.train.longdpo.families import FAMILIES, family_problems, forward_target
from dpofit.train.longdpo.shared_attention import IMPLEMENTATIONS, in_two_calls, lower_right_sdpa
from dpofit.train.longdpo.shared_row import joined, parted, positions, shared_row

TRAINER = "llamafactory.train.dpo.trainer:CustomDPOTrainer"
# Frequencies that do not depend on how long the longest sequence of a batch is.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def hooks() -> list[Hook]:
    """From the trainer to the decoder the pair keeps its two rows; inside the decoder it is one.

    Outside `answer_logps` where both are on, hence the order.
    """
    return [
        Hook(OWNER, f"{TRAINER}.concatenated_forward", _one_row, order=10),
        Hook(OWNER, f"{TRAINER}.get_batch_loss_metrics", _renamed_metrics, order=10),
        *(Hook(OWNER, forward_target(family, "Model"), _decoder) for family in FAMILIES),
        Hook(OWNER, "transformers.modeling_utils:AttentionInterface._global_mapping", _with_shared_attention),
    ]


def model_problems(config: Any) -> list[Problem]:
    """What would make attention over the shared row differ from attention over the two it stands for."""
    problems = family_problems(config, "shared_prompt")
    if problems:
        return problems
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windows or (config.model_type == "mistral" and config.sliding_window is not None):
        right = "Turn it off for this model."
        problems.append(Problem("model", "sliding_window", "is in use; shared_prompt needs whole attention", right))
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in FIXED_ROPE:
        wrong = f"is {rope}; shared_prompt needs positions whose frequencies do not depend on a batch's length"
        problems.append(Problem("model", "rope_type", wrong, f"Use one of {', '.join(FIXED_ROPE)}."))
    if config._attn_implementation not in (None, *IMPLEMENTATIONS):
        wrong = f"is {config._attn_implementation}; shared_prompt knows {', '.join(IMPLEMENTATIONS)}"
        problems.append(Problem("model", "attn_implementation", wrong, "Set flash_attn to sdpa or fa2."))
    if config._attn_implementation == "flash_attention_2" and flash_attn_supports_top_left_mask():
        wrong = "aligns causal masks to the upper left (flash-attn before 2.1); shared_prompt needs the lower right"
        problems.append(Problem("model", "attn_implementation", wrong, "Set flash_attn to sdpa, or update flash-attn."))
    return problems


def _one_row(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any], is_ref_model: bool = False) -> Any:
        if len(batch["input_ids"]) != 2:
            raise ValueError(f"shared_prompt takes one pair at a time, not {len(batch['input_ids']) / 2:g}")
        row = shared_row(batch["input_ids"], batch["attention_mask"])
        output = stock(self, model, {**batch, "shared_prompt": row}, is_ref_model)
        # The padding's states are zero here, so its logits are; the mean is over real tokens, and named so.
        for name, tokens in (("chosen_logits", row.first), ("rejected_logits", row.second)):
            output[name] = output[name].mean() * (row.padded / tokens)
        return output

    return concatenated_forward


def _renamed_metrics(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stock's logits/chosen and logits/rejected are means over padding too, which no longer exists."""

    @functools.wraps(stock)
    def get_batch_loss_metrics(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = stock(*args, **kwargs)
        renamed = {f"{name}_unpadded" if "logits/" in name else name: value for name, value in metrics.items()}
        return loss, renamed

    return get_batch_loss_metrics


def _decoder(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The layout goes on as a keyword to every layer's attention, so a recomputation in backward has it too."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        row = kwargs.get("shared_prompt")
        if row is None:
            return stock(self, *args, **kwargs)
        if self.config._attn_implementation not in IMPLEMENTATIONS:
            raise ValueError(f"shared_prompt does not know the attention {self.config._attn_implementation!r}")
        ids = kwargs["input_ids"]
        # A mask of four dimensions is taken as it is (transformers 5.5.4 masking_utils.py 827); nobody reads this one.
        unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        laid_out = {
            "input_ids": joined(row, ids), "attention_mask": unread, "position_ids": positions(row, ids.device),
        }  # fmt: skip
        output = stock(self, *args, **{**kwargs, **laid_out})
        output.last_hidden_state = parted(row, output.last_hidden_state)
        return output

    return forward


def _with_shared_attention(stock: dict[str, Any]) -> dict[str, Any]:
    """transformers' attention functions by name. Flash attention's causal mask is lower right by itself (2.1 on)."""
    flash = stock["flash_attention_2"]
    return {
        **stock,
        "sdpa": in_two_calls(stock["sdpa"], lower_right_sdpa),
        "flash_attention_2": in_two_calls(flash, flash),
    }
