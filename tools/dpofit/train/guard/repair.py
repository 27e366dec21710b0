"""Writes a Hugging Face folder from what a broken checkpoint still has: ZeRO files, or a final save cut short.

Streams: ZeRO files are memory-mapped, converted chunk by chunk and written through the bounded writer, so repairing a
72B needs no more memory than saving it did. Nothing is unpickled but tensors and three small DeepSpeed classes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from dpofit.errors import BadInput, Problem
from dpofit.train.guard.config import GuardConfig
from dpofit.train.guard.folders import FINAL_NEW, settle_final_save
from dpofit.train.guard.manifest import MANIFEST_NAME, Extent, read_manifest
from dpofit.train.guard.plan import dtype_name, dtype_ranks
from dpofit.train.guard.safetensors_layout import lay_out
from dpofit.train.guard.seal import leave_part, seal
from dpofit.train.guard.sources import host_view
from dpofit.train.guard.writer import BoundedFile

_SHARD_BYTES = 5 * 10**9
_SIDE_FILES = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|"
    r"vocab\.(json|txt)|merges\.txt|.*\.model|chat_template\..*|(pre)?processor_config\.json|.*\.py"
)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A whole tensor as runs of flat tensors that lie one after the other."""

    shape: tuple[int, ...]
    runs: tuple[torch.Tensor, ...]
    dtype: torch.dtype


def repair(checkpoint: Path, out: Path, config: GuardConfig, progress: Progress = lambda nbytes: None) -> int:
    """Write `out` from `checkpoint`; return the bytes written. BadInput names what is missing or not understood."""
    if (checkpoint / FINAL_NEW / MANIFEST_NAME).exists():
        return _finish_elsewhere(checkpoint, out, progress)
    folder = _zero_folder(checkpoint)
    side = _side_files(checkpoint)
    model_config = _read_json(side["config.json"]) if "config.json" in side else {}
    dtype = _DTYPES.get(str(model_config.get("dtype", model_config.get("torch_dtype"))))
    tensors = dict(_tensors(folder, dtype, bool(model_config.get("tie_word_embeddings"))))
    adapter = bool(tensors) and all("lora_" in name or "modules_to_save" in name for name in tensors)
    needed = "adapter_config.json" if adapter else "config.json"
    if needed not in side:
        raise BadInput(
            Problem(str(checkpoint), None, f"has no {needed}, nor has its parent", f"Copy {needed} into it.")
        )
    if adapter:
        tensors = {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
    staging = out / FINAL_NEW
    staging.mkdir(parents=True)
    for name, path in side.items():
        shutil.copyfile(path, staging / name)
    extents = _write_shards(staging, tensors, "adapter_model" if adapter else "model", config, progress)
    leave_part(staging, 0, extents)
    manifest = seal(staging, None, 1, "repair")
    settle_final_save(out)
    return manifest.total_bytes


def _zero_folder(checkpoint: Path) -> Path:
    latest = checkpoint / "latest"
    named = [checkpoint / latest.read_text().strip()] if latest.is_file() else []
    found = [path for path in (*named, *sorted(checkpoint.glob("global_step*"))) if path.is_dir()]
    if not found:
        raise BadInput(Problem(str(checkpoint), None, "has no ZeRO files (global_step*)", "Nothing to repair from."))
    return found[0]


def _side_files(checkpoint: Path) -> dict[str, Path]:
    """Config and tokenizer, from the checkpoint, else from the run folder above it."""
    found: dict[str, Path] = {}
    for place in (checkpoint.parent, checkpoint):
        found |= {path.name: path for path in place.iterdir() if path.is_file() and _SIDE_FILES.fullmatch(path.name)}
    found.pop("zero_to_fp32.py", None)
    return found


def _load(path: Path) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address  # two ints; ZeRO 1 and 2 list one a parameter

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        unsafe = re.search(r"(?:GLOBAL|Unsupported (?:global|class)[: ]+(?:GLOBAL )?)\s*([\w.]+)", str(error))
        wrong = f"holds {unsafe[1]}, which is not loaded from a file" if unsafe else f"can't be loaded ({first})"
        raise BadInput(
            Problem(str(path), None, wrong, "Only tensors, LossScaler, ZeroStageEnum and fragment_address are.")
        ) from None


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    ranked = {int(re.findall(r"zero_pp_rank_(\d+)_", path.name)[0]): path for path in folder.glob(pattern)}
    missing = sorted(set(range(max(ranked, default=-1) + 1)) - set(ranked))
    if missing or not ranked:
        what = f"lacks the files of ranks {', '.join(map(str, missing))}" if missing else f"has no {pattern}"
        raise BadInput(Problem(str(folder), None, what, "All ranks' files are needed."))
    return [ranked[rank] for rank in sorted(ranked)]


def _tensors(folder: Path, dtype: torch.dtype | None, tied: bool) -> Iterator[tuple[str, _Tensor]]:
    """Every tensor of the model by name, as deepspeed 0.18.4 utils/zero_to_fp32.py finds them, without a copy."""
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
    yield from _trainable(stage, optimizers, models[0]["param_shapes"], written)
    yield from _frozen(stage, models, written)
    for name in models[0]["buffer_names"]:
        if name in models[0]["module"]:
            buffer = models[0]["module"][name]
            yield name, _Tensor(tuple(buffer.shape), (buffer.reshape(-1),), buffer.dtype)
    if not tied:
        shapes = {name: shape for group in models[0]["param_shapes"] for name, shape in group.items()}
        for alias, owner in dict(models[0]["shared_params"] or {}).items():
            if owner in shapes:
                for name, tensor in _trainable(stage, optimizers, models[0]["param_shapes"], written):
                    if name == owner:
                        yield alias, tensor


def _ds_dtype(ds_config: Mapping[str, Any]) -> torch.dtype:
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if (ds_config.get(key) or {}).get("enabled"):
            return dtype
    return torch.float32


def _trainable(
    stage: int, optimizers: list[Any], groups: list[Any], dtype: torch.dtype
) -> Iterator[tuple[str, _Tensor]]:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    flats = [state[key] for state in optimizers]
    if stage == 3:  # per rank: all sub-groups in a row; a parameter takes ceil(numel / ranks) elements on each
        position = 0
        for name, shape in (item for group in groups for item in group.items()):
            share = -(-prod(shape) // len(flats))
            runs = [run for flat in flats for run in _narrow(flat, position, share)]
            yield name, _Tensor(tuple(shape), tuple(_trim(runs, prod(shape))), dtype)
            position += share
        return
    for index, group in enumerate(groups):  # per group: the ranks' parts in a row hold the parameters in a row
        parts = [flat[index] for flat in flats]
        position = 0
        for name, shape in group.items():
            yield name, _Tensor(tuple(shape), tuple(_narrow(parts, position, prod(shape))), dtype)
            position += prod(shape)


def _frozen(stage: int, models: list[Any], dtype: torch.dtype) -> Iterator[tuple[str, _Tensor]]:
    for name, shape in dict(models[0].get("frozen_param_shapes") or {}).items():
        holders = models if stage == 3 else models[:1]
        runs = [model["frozen_param_fragments"][name].reshape(-1) for model in holders]
        yield name, _Tensor(tuple(shape), tuple(_trim(runs, prod(shape))), dtype)


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


def _write_shards(
    folder: Path, tensors: Mapping[str, _Tensor], stem: str, config: GuardConfig, progress: Progress
) -> dict[str, list[Extent]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        nbytes = prod(tensor.shape) * tensor.dtype.itemsize
        if shards[-1] and filled + nbytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    total = len(shards)
    extents: dict[str, list[Extent]] = {}
    where: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file_name = f"{stem}.safetensors" if total == 1 else f"{stem}-{index:05d}-of-{total:05d}.safetensors"
        described = {name: (dtype_name(tensors[name].dtype), tensors[name].shape) for name in names}
        ranks = dtype_ranks(tuple(sorted({dtype for dtype, _ in described.values()})))
        layout = lay_out(described, {"format": "pt"}, ranks.__getitem__)
        with BoundedFile(folder, file_name, config.window_bytes) as file:
            header = file.extent(0)
            header.write(layout.header)
            header.finish()
            for slot in layout.slots:
                extent = file.extent(slot.offset)
                for chunk in _converted(tensors[slot.name], config.chunk_bytes):
                    extent.write(chunk)
                    progress(chunk.nbytes)
                extent.finish()
        extents[file_name] = list(file.extents)
        where |= dict.fromkeys(names, file_name)
    if total > 1:
        size = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
        index_document = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps(index_document, indent=2, sort_keys=True) + "\n"
        )
    return extents


def _converted(tensor: _Tensor, chunk_bytes: int) -> Iterator[memoryview]:
    for run in tensor.runs:
        for start in range(0, run.numel(), chunk_bytes // 4):
            part = run[start : start + chunk_bytes // 4].to(tensor.dtype).contiguous()
            yield host_view(part.view(torch.uint8))


def _finish_elsewhere(folder: Path, out: Path, progress: Progress) -> int:
    """Copy a final save that was killed between its renames: files still staged, the others already in place."""
    manifest = read_manifest(folder / FINAL_NEW)
    assert manifest is not None
    out.mkdir(parents=True, exist_ok=True)
    for entry in manifest.files:
        staged = folder / FINAL_NEW / entry.path
        (out / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(staged if staged.exists() else folder / entry.path, out / entry.path)
        progress(entry.bytes)
    shutil.copyfile(folder / FINAL_NEW / MANIFEST_NAME, out / MANIFEST_NAME)
    return manifest.total_bytes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(Problem(str(path), None, f"is not JSON ({error})", "")) from None
    return value if isinstance(value, dict) else {}
