"""Reads a checkpoint's ZeRO files: every tensor of the model as runs of what the ranks hold, nothing copied.

Files are memory-mapped, and nothing is unpickled but tensors and four small DeepSpeed classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from dpofit.errors import BadInput, Problem


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A whole tensor as runs of flat tensors that lie one after the other."""

    shape: tuple[int, ...]
    runs: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in `dtype`."""
        return prod(self.shape) * self.dtype.itemsize


def zero_folder(checkpoint: Path) -> Path:
    """The newest step's ZeRO files, or those that `latest` names."""
    steps = {path: re.fullmatch(r"global_step(\d+)", path.name) for path in checkpoint.glob("global_step*")}
    numbered = {path: int(match[1]) for path, match in steps.items() if match and path.is_dir()}
    if not numbered:
        raise BadInput(Problem(str(checkpoint), None, "has no ZeRO files (global_step*)", "Nothing to repair from."))
    latest = checkpoint / "latest"
    if latest.is_file():
        named = checkpoint / latest.read_text(encoding="utf-8", errors="replace").strip()
        if named in numbered:
            return named
    return max(numbered, key=numbered.__getitem__)


def _load(path: Path) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address  # two ints; ZeRO 1 and 2 list one a parameter

    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        unsafe = re.search(r"(?:GLOBAL|Unsupported (?:global|class)[: ]+(?:GLOBAL )?)\s*([\w.]+)", str(error))
        wrong = f"holds {unsafe[1]}, which is not loaded from a file" if unsafe else f"can't be loaded ({first})"
        raise BadInput(
            Problem(str(path), None, wrong, "Only tensors, loss scalers, ZeroStageEnum and fragment_address are.")
        ) from None


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    ranked = {int(re.findall(r"zero_pp_rank_(\d+)_", path.name)[0]): path for path in folder.glob(pattern)}
    missing = sorted(set(range(max(ranked, default=-1) + 1)) - set(ranked))
    if missing or not ranked:
        what = f"lacks the files of ranks {', '.join(map(str, missing))}" if missing else f"has no {pattern}"
        raise BadInput(Problem(str(folder), None, what, "All ranks' files are needed."))
    return [ranked[rank] for rank in sorted(ranked)]


def zero_tensors(folder: Path, dtype: torch.dtype | None, tied: bool) -> dict[str, WholeTensor]:
    """Every tensor of the model by name, in `dtype` (None: the run's). BadInput says what is missing or not known."""
    try:
        return _tensors(folder, dtype, tied)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        wrong = f"is not laid out like ZeRO files of DeepSpeed 0.18 ({type(error).__name__}: {error})"
        raise BadInput(Problem(str(folder), None, wrong, "Its own zero_to_fp32.py may read them.")) from None


def _tensors(folder: Path, dtype: torch.dtype | None, tied: bool) -> dict[str, WholeTensor]:
    """As deepspeed 0.18.4 utils/zero_to_fp32.py finds them, without a copy."""
    optimizers = [_load(path)["optimizer_state_dict"] for path in _by_rank(folder, "*zero_pp_rank_*_optim_states.pt")]
    stage = int(optimizers[0]["zero_stage"])
    count = optimizers[0]["partition_count"]
    world_size = max(count) if isinstance(count, list) else int(count)
    if world_size != len(optimizers):
        wrong = f"was saved by {world_size} ranks, {len(optimizers)} optimizer files are there"
        raise BadInput(Problem(str(folder), None, wrong, "All ranks' files are needed."))
    pattern = "zero_pp_rank_*_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    paths = _by_rank(folder, pattern) if stage == 3 else sorted(folder.glob(pattern))
    if not paths:
        raise BadInput(
            Problem(str(folder), None, f"has no {pattern}", "The model states are needed for names and shapes.")
        )
    models = [_load(path) for path in paths]
    written = dtype or _ds_dtype(models[0]["ds_config"])
    state = models[0]
    found = dict(_trainable(stage, optimizers, state["param_shapes"], written)) | dict(_frozen(stage, models, written))
    for name in state["buffer_names"]:
        if name in state["module"]:
            found[name] = _whole(state["module"][name], state["module"][name].dtype)
    shared = dict(state["shared_params"] or {})
    if stage < 3:  # ranks hold the whole model; ZeRO-1 lists no frozen parameters elsewhere (engine.py:3883)
        for name, tensor in state["module"].items():
            if name not in found and name not in shared:
                found[name] = _whole(tensor, written)
    if not tied:
        found |= {alias: found[owner] for alias, owner in shared.items() if owner in found}
    return found


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> WholeTensor:
    return WholeTensor(tuple(tensor.shape), (tensor.reshape(-1),), dtype)


def _ds_dtype(ds_config: Mapping[str, Any]) -> torch.dtype:
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if (ds_config.get(key) or {}).get("enabled"):
            return dtype
    return torch.float32


def _trainable(
    stage: int, optimizers: list[Any], groups: list[Any], dtype: torch.dtype
) -> Iterator[tuple[str, WholeTensor]]:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    flats = [state[key] for state in optimizers]
    if stage == 3:  # per rank: all sub-groups in a row; a parameter takes ceil(numel / ranks) elements on each
        position = 0
        for name, shape in (item for group in groups for item in group.items()):
            share = -(-prod(shape) // len(flats))
            runs = [run for flat in flats for run in _narrow(flat, position, share)]
            yield name, WholeTensor(tuple(shape), tuple(_trim(runs, prod(shape))), dtype)
            position += share
        return
    for index, group in enumerate(groups):  # per group: the ranks' parts in a row hold the parameters in a row
        parts = [flat[index] for flat in flats]
        position = 0
        for name, shape in group.items():
            yield name, WholeTensor(tuple(shape), tuple(_narrow(parts, position, prod(shape))), dtype)
            position += prod(shape)


def _frozen(stage: int, models: list[Any], dtype: torch.dtype) -> Iterator[tuple[str, WholeTensor]]:
    for name, shape in dict(models[0].get("frozen_param_shapes") or {}).items():
        holders = models if stage == 3 else models[:1]
        runs = [model["frozen_param_fragments"][name].reshape(-1) for model in holders]
        yield name, WholeTensor(tuple(shape), tuple(_trim(runs, prod(shape))), dtype)


def _narrow(row: list[torch.Tensor], start: int, length: int) -> Iterator[torch.Tensor]:
    """Elements `start`…`start + length` of tensors that lie in a row; BadInput if the row ends before."""
    for tensor in row:
        if start < tensor.numel() and length:
            taken = min(length, tensor.numel() - start)
            yield tensor.reshape(-1).narrow(0, start, taken)
            start, length = 0, length - taken
        else:
            start -= tensor.numel() if length else 0
    if length:
        raise BadInput(Problem("ZeRO files", None, f"end {length:,} elements too early", "A file is cut short."))


def _trim(runs: list[torch.Tensor], numel: int) -> Iterator[torch.Tensor]:
    return _narrow(runs, 0, numel)
