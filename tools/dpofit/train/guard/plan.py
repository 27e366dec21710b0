"""Asks Hugging Face's own save code what it would write, without letting it hold or write a single weight.

The stock `save_model` runs on rank 0 with tensors whose memory is an untouched, sparse memfd: real addresses, real
storages, no pages. A captured `safe_save_file` then says which names go into which file, and every captured tensor's
address says which parameter's bytes it stands for. Config, tokenizer and index are written by the stock code itself.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from dpofit.train.guard.safetensors_layout import FileLayout, lay_out

# Every name by which the stock code reaches safetensors' writer (transformers 5.5.4 modeling_utils.py:39 and
# trainer.py `_save`, peft 0.18.1 peft_model.py:36).
_SAVE_FUNCTIONS = (
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("safetensors.torch", "save_file"),
)
_ALIGNMENT = 64


class NotPlannable(Exception):
    """The stock code would write something that is not bytes of a parameter or buffer; says what."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """`nbytes` at `offset` of `file` are the bytes from `source_offset` on of the state-dict entry `source`."""

    file: int
    name: str
    offset: int
    nbytes: int
    source: str
    source_offset: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All weight files of one save: relative paths, their sizes, and every tensor in them."""

    files: tuple[str, ...]
    file_bytes: tuple[int, ...]
    tensors: tuple[PlannedTensor, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(self.file_bytes)

    def to_json(self) -> list[Any]:
        """As JSON values, compact: a 72B plan is about 80 KB."""
        rows = [[t.file, t.name, t.offset, t.nbytes, t.source, t.source_offset] for t in self.tensors]
        return [list(self.files), list(self.file_bytes), rows]

    @staticmethod
    def from_json(value: list[Any]) -> Plan:
        """The inverse of `to_json`."""
        files, sizes, rows = value
        return Plan(tuple(files), tuple(sizes), tuple(PlannedTensor(*row) for row in rows))


class Regions:
    """Which state-dict entry lies at which address. Entries that share memory are found under one of their names."""

    def __init__(self, entries: Mapping[str, torch.Tensor]) -> None:
        spans = sorted(
            (tensor.data_ptr(), tensor.nbytes, name)
            for name, tensor in entries.items()
            if tensor.nbytes and tensor.is_contiguous()
        )
        self._starts = [start for start, _, _ in spans]
        self._spans = spans

    def locate(self, tensor: torch.Tensor) -> tuple[str, int]:
        """`(entry, byte offset in it)` of a contiguous tensor; KeyError if it lies in none."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0:
            start, nbytes, name = self._spans[index]
            if address + tensor.nbytes <= start + nbytes:
                return name, address - start
        raise KeyError(address)


class VirtualTensors:
    """Tensors with addresses of their own and no memory: all lie in one sparse memfd that nobody touches."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("dpofit-plan", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None

    def allocate(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
        """One contiguous tensor a name, each with a storage of its own."""
        offsets: dict[str, int] = {}
        total = 0
        for name, (dtype, shape) in shapes.items():
            offsets[name] = total
            nbytes = dtype.itemsize * prod(shape)
            total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        os.ftruncate(self._fd, max(total, 1))
        self._map = mmap.mmap(self._fd, max(total, 1))
        return {name: self._tensor(offsets[name], *shapes[name]) for name in shapes}

    def _tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        nbytes = dtype.itemsize * prod(shape)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        assert self._map is not None
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)
        return flat.view(dtype).view(shape)

    def touched(self) -> bool:
        """Whether any page was read or written: then the stock code looked at values, which are not there."""
        return os.fstat(self._fd).st_blocks > 0

    def close(self) -> None:
        """Give the address range back; the tensors keep it until they are gone."""
        os.close(self._fd)
        self._map = None


@contextmanager
def _captured_saves(calls: list[tuple[str, dict[str, torch.Tensor], dict[str, str] | None]]) -> Iterator[None]:
    def capture(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        calls.append((os.fspath(filename), dict(tensors), metadata))

    with ExitStack() as undo:
        for module_name, attribute in _SAVE_FUNCTIONS:
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, attribute):
                undo.callback(setattr, module, attribute, getattr(module, attribute))
                setattr(module, attribute, capture)
        yield


def make_plan(stock_save: Callable[[], Any], regions: Regions, folder: Path, parameter_count: int | None) -> Plan:
    """Run `stock_save` (which writes into `folder`) with its weight writer captured; return what it wanted to write.

    `parameter_count` corrects the index's `total_parameters`, which the stock code gets wrong under ZeRO-3.
    NotPlannable when some tensor is not a run of bytes of one state-dict entry.
    """
    calls: list[tuple[str, dict[str, torch.Tensor], dict[str, str] | None]] = []
    with _captured_saves(calls):
        stock_save()
    if not calls:
        raise NotPlannable("the stock save wrote no safetensors file")
    files: list[str] = []
    sizes: list[int] = []
    planned: list[PlannedTensor] = []
    for filename, tensors, metadata in calls:
        relative = os.path.relpath(filename, folder)
        layout = _layout(tensors, metadata)
        (folder / relative).write_bytes(layout.header)
        os.truncate(folder / relative, layout.file_bytes)
        for slot in layout.slots:
            if slot.nbytes == 0:
                continue
            tensor = tensors[slot.name]
            try:
                source, source_offset = regions.locate(tensor.contiguous())
            except KeyError:
                raise NotPlannable(f"{slot.name} is computed, not a parameter or buffer") from None
            planned.append(PlannedTensor(len(files), slot.name, slot.offset, slot.nbytes, source, source_offset))
        files.append(relative)
        sizes.append(layout.file_bytes)
    _correct_index(folder, files, planned, parameter_count)
    return Plan(tuple(files), tuple(sizes), tuple(planned))


def _layout(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> FileLayout:
    named = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    ranks = dtype_ranks(tuple(sorted({dtype for dtype, _ in named.values()})))
    return lay_out(named, metadata, ranks.__getitem__)


def _correct_index(folder: Path, files: list[str], planned: list[PlannedTensor], parameter_count: int | None) -> None:
    index = folder / "model.safetensors.index.json"
    if parameter_count is None or not index.exists():
        return
    document = json.loads(index.read_text(encoding="utf-8"))
    document["metadata"]["total_size"] = sum(tensor.nbytes for tensor in planned)
    if "total_parameters" in document["metadata"]:
        document["metadata"]["total_parameters"] = parameter_count
    # The stock code's own formatting (transformers 5.5.4 modeling_utils.py:3433).
    index.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@functools.cache
def _dtype_names() -> dict[torch.dtype, str]:
    library = importlib.import_module("safetensors.torch")
    return {dtype: name for name, dtype in library._TYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a torch dtype; NotPlannable if it has none."""
    try:
        return _dtype_names()[dtype]
    except KeyError:
        raise NotPlannable(f"safetensors has no {dtype}") from None


@functools.cache
def dtype_ranks(dtypes: tuple[str, ...]) -> dict[str, int]:
    """The installed library's own dtype order, seen by letting it write one element of each."""
    save = importlib.import_module("safetensors.torch").save
    by_name = {name: dtype for dtype, name in _dtype_names().items()}
    blob = save({name: torch.zeros(8, dtype=torch.uint8).view(by_name[name]) for name in dtypes})
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    order = sorted(dtypes, key=lambda name: header[name]["data_offsets"][0])
    return {name: -position for position, name in enumerate(order)}
