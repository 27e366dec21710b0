"""The model that scores the reference pass, in the place where stock's code looks for it, for as long as that takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def has_adapter(trainer: Any) -> bool:
    """Whether the policy is a frozen base under an adapter, which stock's code switches off for the reference."""
    return hasattr(trainer.accelerator.unwrap_model(trainer.model), "disable_adapter")


@contextmanager
def reference(trainer: Any, load: Callable[[], Any] | None) -> Iterator[Any]:
    """A model that stock's code takes for the reference: the given one, loaded for this only; the base, whose adapter
    stock switches off itself; or the policy, which has not been trained yet."""
    model = trainer.model_wrapped
    if load is not None:
        trainer.ref_model = _prepared(trainer, load())
    elif not has_adapter(trainer):
        trainer.ref_model = model
    try:
        yield model
    finally:
        loaded, trainer.ref_model = trainer.ref_model, None
        if load is not None:
            _freed(trainer, loaded)


def _prepared(trainer: Any, model: Any) -> Any:
    """As the trainer's own __init__ does it (llamafactory 0.9.5 train/dpo/trainer.py 55-103)."""
    from trl.models.utils import prepare_deepspeed
    from trl.trainer import disable_dropout_in_model

    disable_dropout_in_model(model)
    quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    if trainer.is_deepspeed_enabled:
        return model if quantized else prepare_deepspeed(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True).eval()


def _freed(trainer: Any, model: Any) -> None:
    if hasattr(model, "destroy"):  # a DeepSpeed engine
        model.destroy()
    models = trainer.accelerator._models
    models[:] = [one for one in models if one is not model]
    # DeepSpeed keeps every module it has ever made hooks for (parameter_offload.py FWD_MODULE_STACK): take its memory.
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
        if hasattr(parameter, "ds_tensor"):
            parameter.ds_tensor.data = parameter.ds_tensor.data.new_empty(0)
    del model, parameter
    gc.collect()  # modules and engines refer to each other
