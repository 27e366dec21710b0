"""Where the guard meets the Trainer: the wrapped `save_model`, `_save_checkpoint`, `on_save` and resume lookup."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpofit.train import hooks
from dpofit.train.guard import folders
from dpofit.train.guard.config import GuardConfig, read_config
from dpofit.train.guard.engine_files import guarded_engine
from dpofit.train.guard.exchange import Exchange, SaveAborted
from dpofit.train.guard.manifest import MANIFEST_NAME
from dpofit.train.guard.progress import one_line, slower_line
from dpofit.train.guard.room import say_at_start, state_bytes
from dpofit.train.guard.save import Save, SaveReport, record
from dpofit.train.guard.seal import extend, stamps
from dpofit.train.guard.steps import reached
from dpofit.train.guard.stock import instance_attribute, zero_stage

logger = logging.getLogger("dpofit.guard")
OWNER = "guard"


@dataclass
class _State:
    """What the guard remembers about one trainer."""

    config: GuardConfig
    exchange: Exchange
    current: Save | None = None  # set while a checkpoint save is under way
    failed: bool = False  # the last checkpoint save was aborted
    committed: tuple[Path, dict[str, tuple[int, int]]] | None = None  # to be brought up to date after on_save
    said: set[str] = field(default_factory=set)


def guard_hooks() -> list[hooks.Hook]:
    """All patches of the guard."""
    lookup = functools.partial(hooks.Hook, OWNER, wrap=_wrap_last_checkpoint)
    return [
        hooks.Hook(OWNER, "transformers.trainer:Trainer.save_model", _wrap_save_model),
        hooks.Hook(OWNER, "transformers.trainer:Trainer._save_checkpoint", _wrap_save_checkpoint),
        hooks.Hook(OWNER, "transformers.trainer:Trainer.train", _wrap_train),
        hooks.Hook(OWNER, "transformers.trainer_callback:CallbackHandler.on_train_begin", _wrap_on_train_begin),
        hooks.Hook(OWNER, "transformers.trainer_callback:CallbackHandler.on_save", _wrap_on_save),
        lookup(target="transformers.trainer_utils:get_last_checkpoint"),
        lookup(target="transformers.trainer:get_last_checkpoint"),
        lookup(target="llamafactory.hparams.parser:get_last_checkpoint", only_if_imported=True),
    ]


def _wrap_save_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def save_model(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        state = _state(trainer)
        if state is None:
            stock(trainer, output_dir, _internal_call=_internal_call)
        elif state.current is not None:
            state.current.write_weights(stock, state_bytes(trainer))
        else:
            _final_save(trainer, state, stock, Path(output_dir or trainer.args.output_dir))
            if trainer.args.push_to_hub and not _internal_call:
                trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    return save_model


def _wrap_save_checkpoint(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _save_checkpoint(trainer: Any, model: Any, trial: Any) -> None:
        state = _state(trainer)
        if state is None:
            stock(trainer, model, trial)
            return
        state.failed = False
        try:
            _checkpoint_save(trainer, state, stock, model, trial)
        except SaveAborted as aborted:
            state.failed = True
            logger.error("%s. No checkpoint was written for step %d; what was there before is untouched.",
                         aborted, trainer.state.global_step)  # fmt: skip
            if state.config.on_failure == "stop":
                raise

    return _save_checkpoint


def _wrap_train(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        trainer.callback_handler._dpofit_trainer = weakref.ref(trainer)
        return stock(trainer, *args, **kwargs)

    return train


def _wrap_on_train_begin(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def on_train_begin(handler: Any, args: Any, trainer_state: Any, control: Any) -> Any:
        result = stock(handler, args, trainer_state, control)
        trainer = getattr(handler, "_dpofit_trainer", lambda: None)()
        state = None if trainer is None or args.save_strategy == "no" else _state(trainer)
        if state is not None:
            say_at_start(trainer, state.config, state.exchange)  # the engine is up now, nothing has been trained
        return result

    return on_train_begin


def _wrap_on_save(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def on_save(handler: Any, args: Any, trainer_state: Any, control: Any) -> Any:
        state: _State | None = getattr(handler, "_dpofit_guard", None)
        if state is not None and state.failed:
            # Callbacks would write into, and so create, a checkpoint folder without weights.
            control.should_save = False
            return control
        result = stock(handler, args, trainer_state, control)
        if state is not None and state.committed is not None:
            (folder, before), state.committed = state.committed, None
            extend(folder, before)
        return result

    return on_save


def _wrap_last_checkpoint(stock: Callable[[str], str | None]) -> Callable[[str], str | None]:
    @functools.wraps(stock)
    def get_last_checkpoint(folder: str) -> str | None:
        last = stock(folder)
        whole = folders.newest_resumable(Path(folder))
        if last is not None and (whole is None or Path(last).name != whole.name):
            chosen = "none" if whole is None else whole.name
            logger.warning("%s is not whole; resuming from %s", last, chosen)
        return None if whole is None else os.path.join(folder, whole.name)

    return get_last_checkpoint


def _checkpoint_save(trainer: Any, state: _State, stock: Callable[..., Any], model: Any, trial: Any) -> None:
    run_folder = Path(trainer._get_output_dir(trial=trial))
    name = f"checkpoint-{trainer.state.global_step}"
    save = _begin(trainer, state, run_folder, folders.STAGING, name)
    failures: list[str] = []
    deferred_pushes: list[str] = []
    _remember_best(trainer, run_folder)
    try:
        save.open()
        with ExitStack() as stack:
            stack.enter_context(
                instance_attribute(trainer, "_get_output_dir", lambda trial=None: str(save.staging.parent))
            )
            stack.enter_context(instance_attribute(trainer, "_push_from_checkpoint", deferred_pushes.append))
            extents = {}
            if zero_stage(trainer) is not None:
                engine = trainer.deepspeed
                extents = stack.enter_context(guarded_engine(engine, save.staging, state.config, failures))
            state.current = save
            with save.reporting("state"):
                stock(trainer, model, trial)
                _correct_best(trainer, save.staging, run_folder)
                if failures:
                    raise OSError("; ".join(failures))
        save.add_extents(extents)
        reached("state-written")
        save.seal(trainer.state.global_step)
        with save.reporting("commit"):
            if save.leads:
                folders.commit_checkpoint(save.staging, run_folder / name)
        reached("committed")
    except SaveAborted:
        if save.leads:
            folders.remove_tree(save.staging.parent)
        raise
    finally:
        state.current = None
    with save.reporting("rotate"):
        if save.leads:
            folders.rotate(run_folder, trainer.args.save_total_limit, trainer.state.best_model_checkpoint)
    reached("rotated")
    if save.leads:
        state.committed = (run_folder / name, stamps(run_folder / name))
    _tell(save.report(run_folder / name), trainer, state, trainer.state.global_step)
    for folder in deferred_pushes:
        type(trainer)._push_from_checkpoint(trainer, folder.replace(str(save.staging), str(run_folder / name)))


def _final_save(trainer: Any, state: _State, stock: Callable[..., Any], folder: Path) -> None:
    save = _begin(trainer, state, folder, folders.FINAL_NEW, None)
    try:
        save.open()
        save.write_weights(stock, state_bytes=0)
        save.seal(None)
        with save.reporting("commit"):
            if save.leads and save.rank == 0:
                folders.settle_final_save(folder)
                if not _is_pretrained(trainer):
                    # LLaMA-Factory rewrites value-head weights right after this call (callbacks.py:48).
                    (folder / MANIFEST_NAME).unlink()
            elif save.leads:
                folders.remove_tree(save.staging)  # another node's empty copy
        reached("committed")
    except SaveAborted as aborted:
        if save.leads:
            folders.remove_tree(save.staging)
        logger.error("%s. The final model was not written to %s; the newest checkpoint is whole.", aborted, folder)
        raise
    _tell(save.report(folder), trainer, state, None)


def _begin(trainer: Any, state: _State, folder: Path, staging: str, name: str | None) -> Save:
    """Clean up after a killed save, agree that all ranks did, and make a Save."""
    path = folder / staging if name is None else folder / staging / name
    save = Save(trainer, state.config, state.exchange, path)
    with save.reporting("recover"):
        if save.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            folders.recover(folder)
    return save


def _state(trainer: Any) -> _State | None:
    """The guard's memory of this trainer; None where the guard leaves it alone, said once."""
    state: _State | None = getattr(trainer, "_dpofit_guard", None)
    if state is None:
        config = read_config()
        state = trainer._dpofit_guard = _State(config, _exchange(config))
        trainer.callback_handler._dpofit_guard = state
        if config.mode == "off":
            state.said.add("off")
        elif trainer.is_fsdp_enabled:
            logger.warning("dpofit save guard: FSDP is not supported; the stock save runs unguarded")
            state.said.add("off")
    return None if "off" in state.said else state


_exchanges: dict[tuple[int, int], Exchange] = {}


def _exchange(config: GuardConfig) -> Exchange:
    """One for all trainers of the process: a store keeps old keys, so round numbers must never come again."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return Exchange(None, 0, 1, config.timeout_s)
    store = torch.distributed.distributed_c10d._get_default_store()
    place = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    exchange = _exchanges.setdefault(place, Exchange(store, *place, config.timeout_s))
    exchange.use(store, config.timeout_s)
    return exchange


def _is_pretrained(trainer: Any) -> bool:
    from transformers import PreTrainedModel
    from transformers.utils import is_peft_available

    kinds: tuple[type, ...] = (PreTrainedModel,)
    if is_peft_available():
        from peft import PeftModel

        kinds += (PeftModel,)
    return isinstance(trainer.accelerator.unwrap_model(trainer.model), kinds)


def _remember_best(trainer: Any, run_folder: Path) -> None:
    # The stock code looks for the best checkpoint in what it takes for the run folder (trainer.py:3063).
    best = trainer.state.best_global_step
    if best and (run_folder / f"checkpoint-{best}").exists():
        trainer.state.best_model_checkpoint = str(run_folder / f"checkpoint-{best}")


def _correct_best(trainer: Any, staging: Path, run_folder: Path) -> None:
    best = trainer.state.best_model_checkpoint
    if best is not None and Path(best) == staging:
        trainer.state.best_model_checkpoint = str(run_folder / staging.name)
        if trainer.args.should_save:
            trainer.state.save_to_json(str(staging / "trainer_state.json"))


def _tell(report: SaveReport, trainer: Any, state: _State, step: int | None) -> None:
    if not trainer.args.should_save:
        return
    slower = slower_line(report.backend, report.reason) if state.config.mode == "auto" else None
    if slower is not None and slower not in state.said:
        state.said.add(slower)
        logger.warning(slower)
    record(report, Path(trainer.args.output_dir), step)
    line = one_line(report.folder, report.backend, report.bytes, report.seconds, report.peak_extra_bytes,
                    report.native_bytes, report.reason)  # fmt: skip
    print(line, flush=True)
