"""The stock save code, used in two ways: asked what it would write, or made to write without leaking the model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dpofit.train.guard.plan import NotPlannable, Plan, Regions, VirtualTensors, make_plan
from dpofit.train.guard.sources import full_shape, is_partitioned, zero3_entries

StockSave = Callable[..., Any]


def zero_stage(trainer: Any) -> int | None:
    """The trainer's ZeRO stage, None without DeepSpeed."""
    if not trainer.is_deepspeed_enabled or trainer.deepspeed is None:
        return None
    return int(trainer.deepspeed.zero_optimization_stage())


def state_entries(trainer: Any) -> dict[str, torch.Tensor]:
    """Every tensor that the stock save may ask for, by name, without copying or gathering anything."""
    if zero_stage(trainer) == 3:
        return zero3_entries(trainer.deepspeed.module, exclude_frozen=False)
    module = trainer.accelerator.unwrap_model(trainer.deepspeed) if zero_stage(trainer) is not None else trainer.model
    return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def unsupported(trainer: Any) -> str | None:
    """Why the stock code must write this trainer's weights itself; None if a plan can be tried."""
    if not getattr(trainer.args, "save_safetensors", True):
        return "save_safetensors is off"
    if trainer.args.save_on_each_node:
        return "save_on_each_node writes more than one copy"
    if zero_stage(trainer) is not None and trainer.deepspeed.autotp_size() > 1:
        return "AutoTP splits tensors"
    return None


def plan_save(trainer: Any, stock_save: StockSave, folder: Path) -> Plan:
    """Rank 0 only: the stock `save_model`'s plan for `folder`, and everything but weights written into it."""
    reason = unsupported(trainer)
    if reason is not None:
        raise NotPlannable(reason)
    stage = zero_stage(trainer)
    virtual = VirtualTensors()
    try:
        if stage is None:
            regions = Regions(state_entries(trainer))
            return make_plan(lambda: stock_save(trainer, str(folder), _internal_call=True), regions, folder, None)
        tensors = _virtual_entries(trainer, virtual)
        parameter_count = _parameter_count(trainer.deepspeed.module) if stage == 3 else None
        with _consolidation_replaced(trainer, tensors, stage):
            plan = make_plan(
                lambda: stock_save(trainer, str(folder), _internal_call=True), Regions(tensors), folder, parameter_count
            )
        if virtual.touched():
            raise NotPlannable("the stock save reads the weights' values")
        return plan
    finally:
        virtual.close()


def save_native(trainer: Any, stock_save: StockSave, folder: Path) -> None:
    """The stock `save_model` into `folder`, but nothing of the consolidated model outlives the call.

    DeepSpeed's `_zero3_consolidated_16bit_state_dict` returns a dict that a reference cycle keeps alive
    (docs/deepspeed-save-leak.md); emptying the dict frees the weights whatever the cycle does.
    Under ZeRO 0-2 the stock code clones the whole model on every rank, though only rank 0 writes: others skip it.
    """
    stage = zero_stage(trainer)
    if stage is not None and stage < 3 and not trainer.args.should_save and trainer.deepspeed.autotp_size() <= 1:
        return
    if stage != 3:
        stock_save(trainer, str(folder), _internal_call=True)
        return
    engine = trainer.deepspeed
    consolidate = engine._zero3_consolidated_16bit_state_dict
    results: list[dict[str, torch.Tensor]] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        result = consolidate(*args, **kwargs)
        if result is not None:
            results.append(result)
        return result

    with instance_attribute(engine, "_zero3_consolidated_16bit_state_dict", remembered):
        try:
            stock_save(trainer, str(folder), _internal_call=True)
        finally:
            for result in results:
                result.clear()


def native_bytes(entries: Mapping[str, torch.Tensor]) -> int:
    """Bytes that the stock save holds in memory on the writing rank: every distinct tensor, whole."""
    distinct = {id(tensor): tensor for tensor in entries.values()}
    return sum(_numel(tensor) * tensor.element_size() for tensor in distinct.values())


def _virtual_entries(trainer: Any, virtual: VirtualTensors) -> dict[str, torch.Tensor]:
    entries = state_entries(trainer)
    # Under ZeRO-3 the stock code gives tied names one tensor; its clones under ZeRO 0-2 break the tie.
    owner = {name: (id(tensor) if is_partitioned(tensor) else name) for name, tensor in entries.items()}
    first: dict[Any, str] = {}
    for name, key in owner.items():
        first.setdefault(key, name)
    shapes = {name: (entries[name].dtype, full_shape(entries[name])) for name in first.values()}
    tensors = virtual.allocate(shapes)
    return {name: tensors[first[owner[name]]] for name in entries}


@contextmanager
def _consolidation_replaced(trainer: Any, tensors: dict[str, torch.Tensor], stage: int) -> Iterator[None]:
    engine = trainer.deepspeed
    if stage == 3:

        def consolidated(exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
            return {name: tensors[name] for name in zero3_entries(engine.module, exclude_frozen_parameters)}

        with (
            instance_attribute(engine, "_zero3_consolidated_16bit_state_dict", consolidated),
            # Gathering is what this setting is afraid of; the guard does not gather.
            instance_attribute(engine, "zero_gather_16bit_weights_on_model_save", lambda: True),
        ):
            yield
        return
    # accelerate 1.11.0 accelerator.py:3930 imports this name when called.
    utils: Any = importlib.import_module("deepspeed.checkpoint.utils")
    stock_clone = utils.clone_tensors_for_torch_save

    def cloned(state: Any, *args: Any, **kwargs: Any) -> Any:
        return {name: tensors.get(name, value) for name, value in state.items()}

    utils.clone_tensors_for_torch_save = cloned
    try:
        yield
    finally:
        utils.clone_tensors_for_torch_save = stock_clone


@contextmanager
def instance_attribute(obj: Any, name: str, value: Any) -> Iterator[None]:
    had, before = name in vars(obj), vars(obj).get(name)
    object.__setattr__(obj, name, value)
    try:
        yield
    finally:
        if had:
            object.__setattr__(obj, name, before)
        else:
            object.__delattr__(obj, name)


def _parameter_count(module: torch.nn.Module) -> int:
    return sum(_numel(parameter) for parameter in module.parameters())


def _numel(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "ds_numel", tensor.numel()))
