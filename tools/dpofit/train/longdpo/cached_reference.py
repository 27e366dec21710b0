"""The reference's log-probs from one pass before step 1, kept on disk: no second model, no reference forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from dpofit.errors import BadInput, Problem
from dpofit.train.hooks import Hook
from dpofit.train.longdpo import OWNER
from dpofit.train.longdpo.reference_key import Key, reference_key
from dpofit.train.longdpo.reference_model import has_adapter, reference
from dpofit.train.longdpo.reference_pass import score
from dpofit.train.longdpo.reference_rows import Example, batch_keys, examples
from dpofit.train.longdpo.reference_store import Lines, Values, missing, read, refused, remove_lines, seal

FOLDER = Path("dpofit") / "reference"  # under output_dir
_TRAINERS = {"dpo": "CustomDPOTrainer", "kto": "CustomKTOTrainer"}


def hooks() -> list[Hook]:
    """For DPO and KTO: note the run's arguments, build no reference, compute it when training begins, look it up."""
    return [
        hook
        for stage, trainer in _TRAINERS.items()
        for hook in (
            Hook(OWNER, f"llamafactory.train.tuner:run_{stage}", _noting_the_run),
            Hook(OWNER, f"llamafactory.train.{stage}.workflow:create_ref_model", _not_yet),
            Hook(OWNER, f"llamafactory.train.{stage}.trainer:{trainer}.__init__", _attaching),
            # Outside of everything that changes how log-probs are computed: here none are.
            Hook(OWNER, f"llamafactory.train.{stage}.trainer:{trainer}.compute_reference_log_probs", _cached, 100),
        )
    ]


@dataclass(slots=True)
class _Run:
    """One training run: its arguments, how stock makes and asks a reference, and the log-probs once they are there."""

    model_args: Any
    data_args: Any
    training_args: Any
    finetuning_args: Any
    create_ref_model: Callable[..., Any] | None = None
    values: Values = field(default_factory=dict)
    folder: Path = Path()
    scoring: bool = False  # the pass is on


_current: _Run | None = None  # the run whose workflow is on the stack


def _noting_the_run(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def run(model_args: Any, data_args: Any, training_args: Any, finetuning_args: Any, callbacks: Any = None) -> None:
        global _current
        needs = finetuning_args.stage == "kto" or finetuning_args.use_ref_model
        if needs and training_args.do_train:
            _check(model_args, training_args, finetuning_args)
            _current = _Run(model_args, data_args, training_args, finetuning_args)
        try:
            stock(model_args, data_args, training_args, finetuning_args, callbacks)
        finally:
            _current = None

    return run


def _check(model_args: Any, training_args: Any, finetuning_args: Any) -> None:
    problems = []
    if model_args.train_from_scratch:
        problems.append(Problem("recipe", "train_from_scratch", "gives cached_reference no model to know again", ""))
    if model_args.use_unsloth:
        problems.append(Problem("recipe", "use_unsloth", "replaces the model's code, unknown to cached_reference", ""))
    adapter_off = finetuning_args.finetuning_type == "lora" and finetuning_args.ref_model is None
    if adapter_off and training_args.neftune_noise_alpha:
        wrong = "adds noise to stock's reference too, which no cache could repeat"
        problems.append(Problem("recipe", "neftune_noise_alpha", wrong, "Remove it, or switch cached_reference off."))
    if problems:
        raise BadInput(problems)


def _not_yet(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_ref_model(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return stock(*args, **kwargs)
        _current.create_ref_model = functools.partial(stock, *args, **kwargs)
        return None

    return create_ref_model


def _attaching(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        if _current is not None:
            trainer._dpofit_reference = _current
            trainer.add_callback(_WhenTrainingBegins(trainer))

    return init


def _cached(stock: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    @functools.wraps(stock)
    def compute_reference_log_probs(trainer: Any, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
        run: _Run | None = getattr(trainer, "_dpofit_reference", None)
        if run is None or run.scoring:
            return stock(trainer, model, batch)
        if not run.values:
            raise RuntimeError("cached_reference was asked for log-probs before training began")
        logps = _look_up(run, batch)
        if run.finetuning_args.stage == "dpo":
            return logps.chunk(2)
        tags = batch["kto_tags"]
        return logps[tags], logps[~tags], _look_up(run, batch, "kl_")

    return compute_reference_log_probs


def _look_up(run: _Run, batch: Mapping[str, Any], prefix: str = "") -> torch.Tensor:
    """fp32 [rows], on the batch's device."""
    keys = batch_keys(batch, prefix)
    lacking = missing(keys, run.values)
    if lacking:
        raise refused(run.folder, f"lacks {lacking} of {len(keys)} rows of a batch")
    return torch.tensor(
        [run.values[key] for key in keys], dtype=torch.float32, device=batch[f"{prefix}input_ids"].device
    )


class _WhenTrainingBegins(TrainerCallback):
    """Weights are in the engine, none has been trained yet (or a checkpoint's have been put there)."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run: _Run = self._trainer._dpofit_reference
        if not run.values:
            run.folder = Path(args.output_dir) / FOLDER
            run.values = _obtain(self._trainer, run, resumed_at=state.global_step)


def _obtain(trainer: Any, run: _Run, resumed_at: int) -> Values:
    datasets = _datasets(trainer)
    stage = run.finetuning_args.stage
    of = {name: examples(name, dataset, stage) for name, dataset in datasets.items()}
    key, values, sealed = _agree(run, of)
    rows = [row for found in of.values() for example in found for row in example.rows]
    lacking = missing(rows, values)
    if sealed and lacking:
        raise refused(run.folder, f"lacks {lacking:,} of {len(set(rows)):,} rows")
    if lacking and resumed_at and not _frozen_reference(trainer, run):
        raise BadInput(
            Problem(str(run.folder), None,
                    f"has no whole cache of reference log-probs, and training resumes at step {resumed_at}, where the "
                    "model is no longer its own reference",
                    "Start from step 0, or name the starting model as ref_model.")
        )  # fmt: skip
    if lacking:
        values |= _compute(trainer, run, key, datasets, _todo(of, values))
    if not sealed:
        if trainer.args.local_process_index == 0:
            seal(run.folder, key, {row: values[row] for row in dict.fromkeys(rows)})
        _gather(None)  # nobody may remove lines that another rank still reads
        if trainer.args.local_process_index == 0:
            remove_lines(run.folder)
    if trainer.args.process_index == 0:
        how = "computed" if lacking else "found"
        print(f"dpofit cached_reference: {len(set(rows)):,} rows {how}, in {run.folder}", flush=True)
    return values


def _datasets(trainer: Any) -> dict[str, Any]:
    """What training and evaluation will read."""
    named = {"train": trainer.train_dataset}
    evaluates = trainer.args.do_eval or trainer.args.eval_strategy != "no"
    if trainer.eval_dataset is not None and evaluates:
        several = isinstance(trainer.eval_dataset, dict)
        parts = trainer.eval_dataset if several else {"eval": trainer.eval_dataset}
        named |= {f"eval {name}" if several else name: dataset for name, dataset in parts.items()}
    return named


def _agree(run: _Run, of: Mapping[str, list[Example]]) -> tuple[Key, Values, bool]:
    """The key, and what ranks found on their disks, together. All ranks raise when one has a reason to."""
    problems: tuple[Problem, ...] = ()
    key: Key = {}
    values: Values = {}
    sealed = False
    try:
        key = reference_key(run.model_args, run.data_args, run.training_args, run.finetuning_args, of)
        found = read(run.folder, key)
        values, sealed = found.values or _beside_the_checkpoint(run, key), found.sealed
    except BadInput as bad:
        problems = bad.problems
    everyone = _gather((problems, key, sealed))
    problems = tuple(dict.fromkeys(problem for theirs, _, _ in everyone for problem in theirs))
    if problems:
        raise BadInput(problems)
    others = [rank for rank, (_, theirs, _) in enumerate(everyone) if theirs != everyone[0][1]]
    if others:
        raise BadInput(
            Problem(f"rank {others[0]}", None, "has other model files, data or packages than rank 0",
                    "Make every node see the same ones.")
        )  # fmt: skip
    everywhere = all(theirs for _, _, theirs in everyone)
    if not everywhere:  # nodes may have disks of their own
        contributes = run.training_args.local_process_index == 0
        for theirs in _gather(values if contributes else {}):
            values |= theirs
    return key, values, everywhere


def _beside_the_checkpoint(run: _Run, key: Key) -> Values:
    """A run may resume into a new output_dir: its cache is where the checkpoint comes from."""
    checkpoint = run.training_args.resume_from_checkpoint
    if not isinstance(checkpoint, str) or not Path(checkpoint).is_dir():
        return {}
    return read(Path(checkpoint).parent / FOLDER, key).values


def _todo(of: Mapping[str, list[Example]], values: Values) -> list[Example]:
    """Examples with a row that has no log-prob yet, each content once."""
    lacking = [one for found in of.values() for one in found if any(row not in values for row in one.rows)]
    return list({one.rows: one for one in lacking}.values())


def _compute(trainer: Any, run: _Run, key: Key, datasets: Mapping[str, Any], todo: list[Example]) -> Values:
    values: Values = {}
    load = run.create_ref_model if run.finetuning_args.ref_model is not None else None
    run.scoring = True
    try:
        with Lines(run.folder, trainer.args.process_index, key) as lines, reference(trainer, load) as model:
            mine = score(trainer, model, datasets, todo, lines)
    finally:
        run.scoring = False
    for theirs in _gather(mine):
        values |= theirs
    return values


def _frozen_reference(trainer: Any, run: _Run) -> bool:
    """Whether the reference does not change with training: a model of its own, or a base under an adapter."""
    return run.finetuning_args.ref_model is not None or has_adapter(trainer)


def _gather(mine: Any) -> list[Any]:
    """What every rank has, in order of ranks; also a barrier."""
    if not torch.distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone
