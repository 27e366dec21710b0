"""The same runs under real DeepSpeed ZeRO-3: what one rank of a long-lived pair does and reports."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpofit.trace.sequence import record_sequence
from dpofit.train import hooks
from dpofit.train.hooks import Hook
from tests.longdpo.runs import Case, Errors, Seen, errors, run

OWNER = "zero3-test"
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 64, "overlap_comm": False,
        # Each module's weights are gathered when it runs and released after it, so that gathers can be counted.
        "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
    },
}  # fmt: skip


@dataclass
class Compared:
    """What one rank found for one case and one choice of pieces."""

    first_loss: float
    errors: Errors
    head_gathers: tuple[int, int]  # in the last micro-step: with stock code, with the pieces
    head_reductions: tuple[int, int]


def compare_all(
    folder: str, asked: Sequence[tuple[Case, Sequence[Collection[str]]]], zero3: bool = True
) -> list[list[Compared]]:
    """Every case with stock code and then with each choice of pieces, one after the other on these ranks; without
    ZeRO-3 they are plain data-parallel ones."""
    from tests.guard import stack  # noqa: F401

    mine = Path(folder) / os.environ["RANK"]
    mine.mkdir(parents=True, exist_ok=True)
    results = []
    for case, choices in asked:
        stock, stock_head = _run(case, (), mine, zero3 and case.head != "trained")
        row = []
        for pieces in choices:
            long, head = _run(case, pieces, mine, zero3)
            row.append(
                Compared(
                    stock.losses[0], errors(stock, long),
                    (stock_head.gathers, head.gathers), (stock_head.reductions, head.reductions),
                )
            )  # fmt: skip
        results.append(row)
    return results


@dataclass
class Head:
    """How often the policy's head was gathered, and its gradient reduced, in the last micro-step."""

    gathers: int = 0
    reductions: int = 0


def _run(case: Case, pieces: Collection[str], folder: Path, zero3: bool) -> tuple[Seen, Head]:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if not zero3:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    watch = Watch()
    hooks.install(
        [
            Hook(OWNER, "deepspeed.runtime.engine:DeepSpeedEngine.step", watch.wrap_step),
            # The ranks outlive the run (llamafactory 0.9.5 train/tuner.py 139).
            Hook(OWNER, "torch.distributed:destroy_process_group", lambda stock: lambda *args: None),
        ]
    )
    try:
        seen = run(case, pieces, folder, use_cpu=False, deepspeed=DEEPSPEED if zero3 else None)
    finally:
        hooks.uninstall(OWNER)
        unset_hf_deepspeed_config()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    seen.gradients = watch.gradients or seen.gradients
    return seen, watch.head


class Watch:
    """Looks on at every micro-step's end, where DeepSpeed has the gradients and has not used them up."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Any]] = []
        self.head = Head()
        self._log: list[Any] = []
        self._reductions: list[str] = []
        self._started = False

    def wrap_step(self, stock: Any) -> Any:
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            from deepspeed.utils import safe_get_full_grad

            trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
            if engine.is_gradient_accumulation_boundary():
                self.gradients.append({name: safe_get_full_grad(p).clone() for name, p in trained})
            self._count(engine)
            return stock(engine, *args, **kwargs)

        return step

    def _count(self, engine: Any) -> None:
        head = [name for name, p in engine.module.named_parameters() if p is _head(engine.module)]
        gathers = sum(head[0] in names for kind, names, _ in self._log if kind == "gather")
        self.head = Head(gathers, self._reductions.count(head[0]))
        self._log.clear()
        self._reductions.clear()
        if not self._started:
            self._started = True
            record_sequence(engine, self._log)
            names = {p.ds_id: name for name, p in engine.module.named_parameters()}
            stock = engine.optimizer.reduce_ready_partitions_and_remove_grads

            def reduce(param: Any, *args: Any, **kwargs: Any) -> Any:
                self._reductions.append(names[param.ds_id])
                return stock(param, *args, **kwargs)

            engine.optimizer.reduce_ready_partitions_and_remove_grads = reduce


def _head(model: Any) -> Any:
    return model.get_output_embeddings().weight
