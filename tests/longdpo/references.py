"""What a run asked of its reference: log-probs, forwards, models built."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpofit.train import hooks
from tests.longdpo.runs import Case, Seen, run

OWNER = "reference-test"


@dataclass
class References:
    """Of one run."""

    answers: list[list[float]] = field(default_factory=list)  # of every compute_reference_log_probs for a loss
    forwards: int = 0  # of any model, to score pairs
    models: int = 0  # built


def train(case: Case, pieces: Collection[str], folder: Path, **more: Any) -> tuple[Seen, References]:
    with watched(case.stage) as references:
        return run(case, pieces, folder, **more), references


def reference_error(stock: References, cached: References) -> float:
    """The largest relative difference of a reference log-prob."""
    assert len(stock.answers) == len(cached.answers) > 0
    pairs = [pair for a, b in zip(stock.answers, cached.answers, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)


@contextmanager
def watched(stage: str) -> Iterator[References]:
    seen = References()

    def counting(name: str) -> Any:
        def wrap(stock: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                setattr(seen, name, getattr(seen, name) + 1)
                return stock(*args, **kwargs)

            return counted

        return wrap

    def answering(stock: Any) -> Any:
        def answered(trainer: Any, *args: Any) -> Any:
            result = stock(trainer, *args)
            if not getattr(getattr(trainer, "_dpofit_reference", None), "scoring", False):
                seen.answers.append([value for part in result for value in part.tolist()])
            return result

        return answered

    trainer = {"dpo": "CustomDPOTrainer", "kto": "CustomKTOTrainer"}[stage]
    where = f"llamafactory.train.{stage}.trainer:{trainer}"
    hooks.install(
        [
            hooks.Hook(OWNER, f"{where}.compute_reference_log_probs", answering, order=1000),
            hooks.Hook(OWNER, f"{where}.concatenated_forward", counting("forwards"), order=1000),
            hooks.Hook(OWNER, "llamafactory.model.loader:init_adapter", counting("models"), order=1000),
        ]
    )
    try:
        yield seen
    finally:
        hooks.uninstall(OWNER)
