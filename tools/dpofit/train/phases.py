"""Notes on disk what each rank is doing, so that after a death someone can say what it was doing last."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dpofit.train.hooks import Hook

OWNER = "phases"


class Phases:
    """Writes `phase.<local_rank>` in the launcher's state folder; does nothing where there is no launcher."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def from_environment(cls) -> Phases:
        """`DPOFIT_STATE` names the folder."""
        state = os.environ.get("DPOFIT_STATE")
        return cls(Path(state) / f"phase.{os.environ.get('LOCAL_RANK', '0')}" if state else None)

    def enter(self, phase: str, step: int | None = None) -> None:
        """This rank is now in `phase`; `step` counts optimizer steps. A full disk must not end a training run."""
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps({"phase": phase, "step": step, "time": time.time()}))
        except OSError:
            return


def phase_hooks(phases: Phases) -> list[Hook]:
    """Phases before and around training. To be installed before LLaMA-Factory's workflows are imported: they bind
    these functions by name."""

    def during(phase: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(stock)
            def noted(*args: Any, **kwargs: Any) -> Any:
                phases.enter(phase)
                return stock(*args, **kwargs)

            return noted

        return wrap

    return [
        Hook(OWNER, "llamafactory.data:get_dataset", during("dataset")),
        Hook(OWNER, "llamafactory.model:load_model", during("load")),
        Hook(OWNER, "transformers.trainer:Trainer.train", during("init")),
        Hook(OWNER, "transformers.trainer:Trainer.save_model", during("save")),
    ]


class PhaseCallback(TrainerCallback):
    """Phases inside training."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step numbers are 1-based, like those of checkpoints."""
        self._phases.enter("train", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What follows a step: log, evaluate, save."""
        self._phases.enter("after step", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluation, batch by batch."""
        self._phases.enter("eval", state.global_step)
