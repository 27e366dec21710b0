"""The one pass over the data that scores every row with the reference model, sharded over the ranks."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dpofit.errors import BadInput, Problem
from dpofit.train.longdpo.reference_rows import TEXT_INPUTS, Example, batch_keys
from dpofit.train.longdpo.reference_store import Lines, Values

_SECONDS_BETWEEN_LINES = 60  # of progress, where stderr is no terminal


def score(
    trainer: Any,
    model: Any,
    datasets: Mapping[str, Any],
    todo: Sequence[Example],
    lines: Lines,
) -> Values:
    """This rank's share of `todo`, scored by the trainer's own `compute_reference_log_probs`.

    Batches are as large as in training. The longest examples come first, so that ranks wait for each other least and
    what does not fit fails at once. All ranks make equally many forwards: ZeRO-3 gathers weights in each.
    """
    rank, world_size = trainer.args.process_index, trainer.args.world_size
    size = trainer.args.per_device_train_batch_size
    ordered = sorted(todo, key=lambda example: (-example.tokens, example.rows))
    starts = range(0, len(ordered), size * world_size)
    values: Values = {}
    was_training = model.training
    model.eval()
    try:
        with _progress(len(ordered), rank) as advance:
            for start in starts:
                mine = ordered[start + rank * size : start + (rank + 1) * size] or ordered[-1:]
                scored = _score_batch(trainer, model, [datasets[one.dataset][one.index] for one in mine])
                lines.add({row: value for row, value in scored.items() if row not in values})
                values |= scored
                advance(min(size * world_size, len(ordered) - start))
    finally:
        model.train(was_training)
        _forget_forwards(model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # segments cut for all these lengths would only be in training's way
    return values


def _score_batch(trainer: Any, model: Any, features: list[dict[str, Any]]) -> Values:
    batch = trainer.data_collator([dict(feature) for feature in features])
    others = sorted(batch.keys() - TEXT_INPUTS)
    if others:
        raise BadInput(
            Problem("recipe", "dataset", f"cached_reference can't tell rows with {', '.join(others)} apart",
                    "Switch the piece off for data that is more than text.")
        )  # fmt: skip
    with torch.no_grad():
        results = trainer.compute_reference_log_probs(model, trainer._prepare_inputs(batch))
    if "kto_tags" not in batch:  # [pairs] each: chosen rows come first in the batch
        logps = torch.cat(results)
        return dict(zip(batch_keys(batch), logps.double().tolist(), strict=True))
    chosen, rejected, kl = results
    logps = torch.empty(len(batch["kto_tags"]), dtype=torch.float64)
    logps[batch["kto_tags"].cpu()] = chosen.double().cpu()
    logps[~batch["kto_tags"].cpu()] = rejected.double().cpu()
    scored = dict(zip(batch_keys(batch), logps.tolist(), strict=True))
    return scored | dict(zip(batch_keys(batch, "kl_"), kl.double().tolist(), strict=True))


def _forget_forwards(model: Any) -> None:
    """Have ZeRO-3 record the order of training's modules from scratch, as if there had been no pass.

    DeepSpeed 0.18.4 (partitioned_param_coordinator.py 530) remembers which weights to release after which module for
    good, also when the order it was derived from turns out wrong. From forwards alone it learns that the last layers
    and the head are not needed again, and would gather them once more for every backward.
    """
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return
    coordinator = offload.get_param_coordinator()
    if coordinator.is_complete_trace():
        coordinator._invalidate_trace()
    marked = type(coordinator)._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(marked).nonlocals["func"].cache_clear()  # an lru_cache within a function that marks its time


@contextmanager
def _progress(total: int, rank: int) -> Iterator[Callable[[int], None]]:
    """On rank 0 a bar on the terminal, or a line a minute in a log."""
    if rank != 0:
        yield lambda done: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("reference log-probs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.advance(task, done)
        return
    done_so_far, started, told = 0, time.monotonic(), time.monotonic()

    def advance(done: int) -> None:
        nonlocal done_so_far, told
        done_so_far += done
        if time.monotonic() - told > _SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            left_s = (told - started) / done_so_far * (total - done_so_far)
            print(f"dpofit cached_reference: {done_so_far:,} of {total:,} examples, {left_s / 60:.0f} min left",
                  file=sys.stderr, flush=True)  # fmt: skip

    yield advance
