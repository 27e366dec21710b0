"""`answer_logps`: the head runs on the positions that predict a label only, and gives log-probs instead of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from dpofit.errors import Problem
from dpofit.train.hooks import Hook
from dpofit.train.longdpo import OWNER
from dpofit.train.longdpo.answer_head import answer_head
from dpofit.train.longdpo.families import FAMILIES, LOADER, family_problems, forward_target

IGNORE_INDEX = -100  # llamafactory 0.9.5 extras/constants.py
LENGTH_AVERAGED = ("ipo", "orpo", "simpo")  # train/dpo/trainer.py 210


@dataclass
class AnswerOutput(ModelOutput):
    """What a causal model gives for `answer_labels` or `labels` [rows, tokens], in place of logits."""

    loss: Tensor | None = None  # of `labels`, as transformers' ForCausalLMLoss
    logps: Tensor | None = None  # [labels that count] fp32, in the order of the rows
    logit_sums: Tensor | None = None  # [rows] fp32: all logits of a row, every position, added up
    logit_means: Tensor | None = None  # [rows] fp32: their mean


def hooks() -> list[Hook]:
    """DPO and KTO ask for log-probs, SFT for the loss of its labels; the models answer both."""
    return [
        Hook(OWNER, "llamafactory.train.dpo.trainer:CustomDPOTrainer.concatenated_forward", lambda stock: _pairs),
        Hook(OWNER, "llamafactory.train.kto.trainer:CustomKTOTrainer.forward", lambda stock: _kto),
        Hook(OWNER, f"{LOADER}:apply_liger_kernel", _keep_the_head),
        *(Hook(OWNER, forward_target(family, "ForCausalLM"), _answering) for family in FAMILIES),
    ]


def model_problems(config: Any) -> list[Problem]:
    """Families that do more with logits than compute them."""
    return family_problems(config, "answer_logps")


def answer_positions(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where labels [rows, tokens] are predicted, as indices into [rows * tokens], and the labels there; both [n].

    The state before a label predicts it; a row's first label has none. One device synchronisation (n is data).
    """
    row, position = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    before = row * labels.shape[1] + position
    return before, labels.flatten().index_select(0, before + 1)


def sequence_logps(logps: Tensor, labels: Tensor, ld_alpha: float | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs [n] in the order of `answer_positions` summed for each row, and how many each has, both [rows].

    With `ld_alpha`, labels beyond the length of a pair's shorter answer count that much (train/trainer_utils.py
    613-636, LD-DPO); rows are then all chosen, then all rejected.
    """
    counts = labels[:, 1:] != IGNORE_INDEX
    length = counts.sum(-1)
    each = logps.new_zeros(counts.shape).masked_scatter(counts, logps)
    if ld_alpha is None:
        return each.sum(-1), length
    chosen, rejected = length.chunk(2)
    end = counts.int().argmax(1) + torch.minimum(chosen, rejected).repeat(2)
    common = torch.arange(counts.shape[1], device=labels.device) < end[:, None]
    return (each * common).sum(-1) + ld_alpha * (each * ~common).sum(-1), length


def _answering(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer_labels = kwargs.pop("answer_labels", None)
        labels = kwargs.get("labels") if answer_labels is None else answer_labels
        if labels is None:
            return stock(self, *args, **kwargs)
        for name in ("labels", "return_dict", "logits_to_keep"):
            kwargs.pop(name, None)
        items = kwargs.pop("num_items_in_batch", None)
        hidden = self.model(*args, **kwargs).last_hidden_state
        positions, targets = answer_positions(labels)
        with torch.no_grad():
            sums = hidden.sum(1, dtype=torch.float32)
        states = hidden.flatten(0, 1).index_select(0, positions)
        logps, logit_sums = answer_head(self.lm_head)(states, targets, sums)
        loss = None if answer_labels is not None else -logps.sum() / (logps.numel() if items is None else items)
        means = logit_sums / (labels.shape[1] * self.config.vocab_size)
        return AnswerOutput(loss=loss, logps=logps, logit_sums=logit_sums, logit_means=means)

    return forward


def _pairs(self: Any, model: Any, batch: dict[str, Any], is_ref_model: bool = False) -> dict[str, Tensor]:
    """CustomDPOTrainer.concatenated_forward (train/dpo/trainer.py 192-229), with the same result but the logits, of
    which the metrics want the mean: that of each chosen and each rejected row."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    output = model(**inputs, answer_labels=labels, return_dict=True, use_cache=False)
    logps, length = sequence_logps(output.logps, labels, None if is_ref_model else self.ld_alpha)
    averaged = self.loss_type in LENGTH_AVERAGED
    if averaged:
        logps = logps / length
    chosen_logps, rejected_logps = logps.chunk(2)
    chosen_logits, rejected_logits = output.logit_means.chunk(2)
    chosen_length, _ = length.chunk(2)
    return {
        "chosen_logps": chosen_logps,
        "rejected_logps": rejected_logps,
        "chosen_logits": chosen_logits,
        "rejected_logits": rejected_logits,
        "chosen_logps_avg": chosen_logps if averaged else chosen_logps / chosen_length,
    }


def _kto(self: Any, model: Any, batch: dict[str, Any], prefix: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """CustomKTOTrainer.forward (train/kto/trainer.py 153-187), with each row's sum of logits for its logits: the
    trainer only adds them up."""
    labels = batch[f"{prefix}labels"]
    inputs = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
    output = model(**inputs, answer_labels=labels, return_dict=True, use_cache=False)
    logps, length = sequence_logps(output.logps, labels)
    return output.logit_sums, logps, logps / length


def _keep_the_head(stock: Callable[..., None]) -> Callable[..., None]:
    """Liger's fused cross-entropy takes the head's place in SFT; say that logits are wanted, as in DPO."""

    @functools.wraps(stock)
    def apply_liger_kernel(config: Any, model_args: Any, is_trainable: bool, require_logits: bool) -> None:
        stock(config, model_args, is_trainable, require_logits=True)

    return apply_liger_kernel
