"""`torch.save` with bounded memory and page cache: the optimizer and model-state files of a ZeRO checkpoint.

torch writes the zip's skeleton with holes where the storages go (`skip_data`), then the storages are copied into the
holes chunk by chunk, from CPU or GPU. `torch.load` reads the result like any other, `weights_only` and `mmap` too.
The zip's CRC fields are those of the holes; torch does not check them, `unzip -t` would.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from dpofit.train.guard.config import GuardConfig
from dpofit.train.guard.manifest import Extent, hash_range, uncovered
from dpofit.train.guard.sources import Staging
from dpofit.train.guard.writer import BoundedFile


class _StorageRecorder(pickle.Pickler):
    """Meets the storages in the order in which torch.save numbers them (torch 2.13 serialization.py `_save`)."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.storage.TypedStorage):
            obj = obj._untyped_storage
        elif not torch.is_storage(obj):
            return None
        self.storages.setdefault(obj._cdata, obj)
        return str(obj._cdata)


def storages_of(state: Any) -> list[torch.UntypedStorage]:
    """The distinct storages in `state`, in torch.save's order."""
    recorder = _StorageRecorder()
    recorder.dump(state)
    return list(recorder.storages.values())


def save_bounded(state: Any, root: Path, relative: str, config: GuardConfig) -> list[Extent]:
    """Write `state` to `root/relative`; return extents that cover the file. OSError when the disk won't take it."""
    path = root / relative
    storages = storages_of(state)
    with torch.serialization.skip_data():
        torch.save(state, path)
    reader: Any = torch._C.PyTorchFileReader(os.fspath(path))
    records = {name for name in reader.get_all_records() if name.startswith("data/")}
    if len(records) != len(storages):
        raise RuntimeError(f"{relative}: torch numbered {len(records)} storages, we found {len(storages)}")
    offsets = [reader.get_record_offset(f"data/{index}") for index in range(len(storages))]
    del reader
    staging = Staging(config.chunk_bytes)
    with BoundedFile(root, relative, config.window_bytes, create=False) as file:
        for storage, offset in zip(storages, offsets, strict=True):
            if storage.nbytes() == 0:
                continue
            extent = file.extent(offset)
            for chunk in staging.chunks(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)):
                extent.write(chunk)
            extent.finish()
    extents = list(file.extents)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        extents += [hash_range(fd, offset, length) for offset, length in uncovered(extents, os.fstat(fd).st_size)]
    finally:
        os.close(fd)
    return extents
