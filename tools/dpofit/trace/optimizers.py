"""The optimizer of a traced run: the class and the parameter groups that transformers' Trainer would choose."""

from __future__ import annotations

from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dpofit.memory.badam import layer_in_turn
from dpofit.recipe.recipe import Recipe
from dpofit.trace.request import TraceRequest

if TYPE_CHECKING:
    import torch

# Those whose package is part of the training stack.
TRACED = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


def own_optimizer(recipe: Recipe) -> tuple[tuple[str, Any], ...]:
    """The recipe's keys for one of LLaMA-Factory's own optimizers."""
    if recipe.low_rank is not None:
        kind, low_rank = recipe.low_rank.kind, recipe.low_rank
        found: dict[str, Any] = {
            f"use_{kind}": True, f"{kind}_rank": low_rank.rank, f"{kind}_target": ",".join(low_rank.targets),
            f"{kind}_proj_type": low_rank.projection, f"{kind}_layerwise": low_rank.layerwise,
        }  # fmt: skip
        if kind == "apollo":
            found["apollo_proj"] = "random" if low_rank.random else "svd"
        return tuple(found.items())
    if recipe.badam is not None:
        turn = layer_in_turn(recipe.badam)
        return (("use_badam", True), ("badam_switch_mode", "ascending"), ("badam_start_block", turn))
    for key, asked in (("use_muon", recipe.use_muon), ("use_adam_mini", recipe.use_adam_mini)):
        if asked:
            return ((key, True),)
    return ()


def missing_package(recipe: Recipe) -> str | None:
    """The package of the recipe's optimizer, where it isn't installed."""
    asked = {"adam_mini": recipe.use_adam_mini, "badam": recipe.badam is not None}
    wanted = [name for name, on in asked.items() if on]
    if recipe.low_rank is not None:
        wanted.append(f"{recipe.low_rank.kind}_torch")
    return next((name for name in wanted if find_spec(name) is None), None)


def make_optimizer(request: TraceRequest, model: torch.nn.Module, finetuning_args: Any) -> torch.optim.Optimizer:
    """LLaMA-Factory's own optimizer where the request asks for one, else Trainer.create_optimizer: two groups, with and
    without weight decay."""
    import torch
    from llamafactory.train.trainer_utils import create_custom_optimizer
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    arguments = SimpleNamespace(
        optim=OptimizerNames(request.optimizer), optim_args=None, learning_rate=1e-6, adam_beta1=0.9, adam_beta2=0.999,
        adam_epsilon=1e-8, weight_decay=request.weight_decay, gradient_accumulation_steps=request.micro_batches,
    )  # fmt: skip
    if request.own_optimizer:
        with redirect_stdout(StringIO()):  # Adam-mini prints each of its blocks
            own = create_custom_optimizer(model, arguments, finetuning_args)  # type: ignore[arg-type]
        assert own is not None
        if isinstance(wrapped := getattr(own, "base_optimizer", None), torch.optim.Optimizer):  # BAdam's
            for group in wrapped.param_groups:
                group |= _foreach(request.optimizer)
        return own
    decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in trainable if name in decay], "weight_decay": request.weight_decay},
        {"params": [param for name, param in trainable if name not in decay], "weight_decay": 0.0},
    ]
    cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments)  # type: ignore[arg-type]
    return cls(groups, **options, **_foreach(request.optimizer))  # type: ignore[no-any-return]


def _foreach(name: str) -> dict[str, Any]:
    """torch takes its foreach kernels by default on CUDA only (optim/optimizer.py _default_to_fused_or_foreach)."""
    return {"foreach": True} if name in ("adamw_torch", "sgd", "adagrad", "rmsprop") else {}
