"""Writes a Hugging Face folder from what a broken checkpoint still has: ZeRO files, or a final save cut short.

Streams: ZeRO files are memory-mapped, converted chunk by chunk and written through the bounded writer, so repairing a
72B needs no more memory than saving it did. Nothing is unpickled but tensors and four small DeepSpeed classes.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dpofit.errors import BadInput, Problem
from dpofit.train.guard.config import GuardConfig
from dpofit.train.guard.folders import FINAL_NEW, REPAIR_BACKEND, is_left_by_repair, settle_final_save
from dpofit.train.guard.machine import free_disk_bytes
from dpofit.train.guard.manifest import MANIFEST_NAME, Extent, read_manifest, write_manifest
from dpofit.train.guard.plan import dtype_name, dtype_ranks
from dpofit.train.guard.safetensors_layout import lay_out, read_json_object
from dpofit.train.guard.seal import leave_part, seal
from dpofit.train.guard.sources import host_view
from dpofit.train.guard.writer import BoundedFile
from dpofit.train.guard.zero_files import WholeTensor, zero_folder, zero_tensors

_SHARD_BYTES = 5 * 10**9
_SIDE_FILES = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|"
    r"vocab\.(json|txt)|merges\.txt|.*\.model|chat_template\..*|(pre)?processor_config\.json|.*\.py"
)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Progress = Callable[[int], None]


def repair(checkpoint: Path, out: Path, config: GuardConfig, progress: Progress = lambda nbytes: None) -> int:
    """Write `out` from `checkpoint`; return the bytes written. BadInput names what is missing or not understood.

    `out` may hold what a killed repair left there. A repair that fails leaves nothing.
    """
    if out.is_dir() and is_left_by_repair(out):
        settle_final_save(out)  # killed between its last renames, it is all there; before, it goes
        if (manifest := read_manifest(out)) is not None:
            return manifest.total_bytes
    try:
        if (checkpoint / FINAL_NEW / MANIFEST_NAME).exists():
            return _finish_elsewhere(checkpoint, out, progress)
        return _from_zero_files(checkpoint, out, config, progress)
    except OSError as error:
        shutil.rmtree(out / FINAL_NEW, ignore_errors=True)
        with suppress(OSError):
            out.rmdir()  # ours if it is empty
        where = error.filename or out
        raise BadInput(Problem(str(where), None, f"{error.strerror or error}", "Nothing was left behind.")) from None


def _from_zero_files(checkpoint: Path, out: Path, config: GuardConfig, progress: Progress) -> int:
    folder = zero_folder(checkpoint)
    side = _side_files(checkpoint)
    model_config = _read_json(side["config.json"]) if "config.json" in side else {}
    dtype = _DTYPES.get(str(model_config.get("dtype", model_config.get("torch_dtype"))))
    tensors = zero_tensors(folder, dtype, bool(model_config.get("tie_word_embeddings")))
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
    wanted, free = sum(tensor.nbytes for tensor in tensors.values()), free_disk_bytes(staging)
    if wanted > free:
        raise OSError(errno.ENOSPC, f"needs {wanted:,} bytes, {free:,} are free", str(out))
    for name, path in side.items():
        shutil.copyfile(path, staging / name)
    extents = _write_shards(staging, tensors, "adapter_model" if adapter else "model", config, progress)
    leave_part(staging, 0, extents)
    manifest = seal(staging, None, 1, REPAIR_BACKEND)
    settle_final_save(out)
    return manifest.total_bytes


def _side_files(checkpoint: Path) -> dict[str, Path]:
    """Config and tokenizer, from the checkpoint, else from the run folder above it."""
    found: dict[str, Path] = {}
    for place in (checkpoint.parent, checkpoint):
        found |= {path.name: path for path in place.iterdir() if path.is_file() and _SIDE_FILES.fullmatch(path.name)}
    found.pop("zero_to_fp32.py", None)
    return found


def _write_shards(
    folder: Path, tensors: Mapping[str, WholeTensor], stem: str, config: GuardConfig, progress: Progress
) -> dict[str, list[Extent]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
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
        size = sum(tensor.nbytes for tensor in tensors.values())
        index_document = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps(index_document, indent=2, sort_keys=True) + "\n"
        )
    return extents


def _converted(tensor: WholeTensor, chunk_bytes: int) -> Iterator[memoryview]:
    for run in tensor.runs:
        for start in range(0, run.numel(), chunk_bytes // 4):
            part = run[start : start + chunk_bytes // 4].to(tensor.dtype).contiguous()
            yield host_view(part.view(torch.uint8))


def _finish_elsewhere(folder: Path, out: Path, progress: Progress) -> int:
    """Copy a final save that was killed between its renames: files still staged, the others already in place."""
    try:
        manifest = read_manifest(folder / FINAL_NEW)
    except ValueError as error:
        raise BadInput(Problem(str(folder / FINAL_NEW), None, str(error), "Nothing to repair from.")) from None
    assert manifest is not None
    staging = out / FINAL_NEW
    for entry in manifest.files:
        waiting = folder / FINAL_NEW / entry.path
        (staging / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(waiting if waiting.exists() else folder / entry.path, staging / entry.path)
        progress(entry.bytes)
    write_manifest(staging, dataclasses.replace(manifest, backend=REPAIR_BACKEND))
    settle_final_save(out)
    return manifest.total_bytes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise BadInput(Problem(str(path), None, str(error), "Put the model's own there.")) from None
