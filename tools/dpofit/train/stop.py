"""Ends training on every node at the same step, checkpoint saved, when `dpofit stop` has left its flag file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

STOP_FILE = "stop"


class StopOnFlag(TrainerCallback):
    """After each step the first rank of each node looks for its flag; one all-reduce tells everybody.

    The all-reduce (4 bytes) makes all ranks stop after the same step, whichever node was told.
    """

    def __init__(self) -> None:
        state = os.environ.get("DPOFIT_STATE")
        self._flag = Path(state) / STOP_FILE if state else None
        self._looks = os.environ.get("LOCAL_RANK", "0") == "0"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save and stop after this step if any node was asked to."""
        told = self._flag is not None and self._looks and self._flag.exists()
        if _any_rank(told, args.device):
            if state.is_world_process_zero:
                print(f"dpofit: asked to stop; saving after step {state.global_step}", flush=True)
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True
        return control


def _any_rank(told: bool, device: torch.device) -> bool:
    if not torch.distributed.is_initialized():
        return told
    votes = torch.tensor([int(told)], device=device)
    torch.distributed.all_reduce(votes)
    return bool(votes.item())
