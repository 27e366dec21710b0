"""The optimizer of a traced run: the class and the parameter groups that transformers' Trainer would choose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dpofit.trace.request import TraceRequest

if TYPE_CHECKING:
    import torch

# Those whose package is part of the training stack.
TRACED = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


def make_optimizer(request: TraceRequest, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Trainer.create_optimizer: two groups, with and without weight decay."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in trainable if name in decay], "weight_decay": request.weight_decay},
        {"params": [param for name, param in trainable if name not in decay], "weight_decay": 0.0},
    ]
    arguments = SimpleNamespace(
        optim=OptimizerNames(request.optimizer), optim_args=None, learning_rate=1e-6, adam_beta1=0.9, adam_beta2=0.999,
        adam_epsilon=1e-8,
    )  # fmt: skip
    cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments)  # type: ignore[arg-type]
    return cls(groups, **options, **_foreach(request.optimizer))  # type: ignore[no-any-return]


def _foreach(name: str) -> dict[str, Any]:
    """torch takes its foreach kernels by default on CUDA only (optim/optimizer.py _default_to_fused_or_foreach)."""
    return {"foreach": True} if name in ("adamw_torch", "sgd", "adagrad", "rmsprop") else {}
