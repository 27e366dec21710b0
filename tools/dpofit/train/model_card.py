"""Keeps a final save's manifest right when the model card is written over one of its files afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpofit.train.guard.seal import extend, stamps
from dpofit.train.hooks import Hook

OWNER = "model card"


def model_card_hooks() -> list[Hook]:
    """llamafactory 0.9.5 train/trainer_utils.py 113 writes README.md after `save_model`; peft's save, which the
    manifest covers, has written one before."""
    return [Hook(OWNER, "transformers.trainer:Trainer.create_model_card", _wrap)]


def _wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_model_card(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(trainer.args.output_dir)
        if not trainer.is_world_process_zero():
            return stock(trainer, *args, **kwargs)
        before = stamps(folder)
        result = stock(trainer, *args, **kwargs)
        extend(folder, before)
        return result

    return create_model_card
