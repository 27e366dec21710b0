"""Decides whether a checkpoint is whole: sizes, checksums, every tensor present once, dtype and shape against config.

Reads safetensors headers, JSON and raw bytes only: no torch, nothing is unpickled, nothing leaves the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dpofit.findings import Evidence, Finding, Severity
from dpofit.train.guard.durable import read_once
from dpofit.train.guard.folders import FINAL_NEW, FINAL_PREVIOUS
from dpofit.train.guard.manifest import MANIFEST_NAME, Manifest, hash_range, read_manifest
from dpofit.train.guard.safetensors_layout import TensorSlot, read_layout
from dpofit.train.guard.shapes import expected_problems

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_REPAIR = "Write a Hugging Face folder from the ZeRO files: dpofit repair CHECKPOINT OUT."
_HOLE_BYTES = 1 << 16  # a run of zeros this long inside a weight matrix doesn't come from training

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Weights:
    """All tensors that the folder's safetensors files hold, by name and file."""

    slots: dict[str, tuple[str, TensorSlot]]
    findings: list[Finding]


def check_checkpoint(folder: Path, progress: Progress = lambda nbytes: None) -> list[Finding]:
    """Findings about the checkpoint in `folder`; none of severity error means that it is whole, as far as it tells.

    With a manifest every byte is checked; without one, structure, tensors and zero-filled holes are.
    """
    findings = [*_interrupted(folder)]
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        findings.append(_finding("save.manifest-unreadable", "error", "the manifest can't be read", folder, str(error)))
    weights = _read_weights(folder)
    findings += weights.findings
    findings += _against_index(folder, weights)
    findings += _missing_weights(folder, weights, manifest)
    findings += _against_config(folder, weights)
    if manifest is not None:
        findings += _against_manifest(folder, manifest, progress)
    elif not findings or weights.slots:
        if not any(finding.id == "save.manifest-unreadable" for finding in findings):
            findings.append(
                _finding(
                    "save.no-manifest", "info", "no manifest: checksums can't be checked", folder / MANIFEST_NAME,
                    "not there; written by the stock save, or by a callback after the guard", fix="",
                )
            )  # fmt: skip
        findings += _holes(folder, weights, progress)
    return findings


def total_bytes(folder: Path) -> int:
    """Bytes that `check_checkpoint` will read at most, for a progress bar."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _interrupted(folder: Path) -> Iterator[Finding]:
    left = [name for name in (FINAL_NEW, FINAL_PREVIOUS) if (folder / name).is_dir()]
    if not left:
        return
    staged = (folder / FINAL_NEW / MANIFEST_NAME).exists()
    yield Finding(
        "save.final-interrupted", "error" if (folder / FINAL_PREVIOUS).is_dir() else "warning",
        "a final save was killed while it " + ("moved its files in" if staged else "was being written"),
        tuple(Evidence(str(folder / name), "is still there") for name in left),
        cause="the process died between the first and the last rename of the save",
        fix="The next guarded save into this folder finishes it; or copy it out whole: dpofit repair FOLDER OUT."
        if staged else "The next guarded save into this folder removes it; what was there before is untouched.",
    )  # fmt: skip


def _read_weights(folder: Path) -> _Weights:
    slots: dict[str, tuple[str, TensorSlot]] = {}
    findings: list[Finding] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            layout, _ = read_layout(path)
        except ValueError as error:
            findings.append(
                _finding("save.bad-header", "error", "a weights file has no valid header", path, str(error))
            )
            continue
        size = path.stat().st_size
        if size != layout.file_bytes:
            findings.append(
                _finding(
                    "save.wrong-size", "error", "a weights file is cut short or has bytes too many", path,
                    f"{size:,} bytes, its header describes {layout.file_bytes:,}",
                )
            )  # fmt: skip
        for slot in layout.slots:
            if slot.name in slots:
                findings.append(
                    _finding("save.duplicate-tensor", "error", "a tensor is stored twice", path,
                             f"{slot.name} is also in {slots[slot.name][0]}")
                )  # fmt: skip
            slots[slot.name] = (path.name, slot)
    empty = [(file, slot) for file, slot in slots.values() if slot.nbytes == 0]
    if empty:
        findings.append(
            Finding(
                "save.empty-tensors", "error", f"{len(empty)} tensors have no elements",
                tuple(Evidence(str(folder / file), f"{slot.name} is {list(slot.shape)}") for file, slot in empty[:5]),
                cause="saved under ZeRO-3 without gathering: each rank's placeholder was written instead of the weight",
                fix=_REPAIR,
            )
        )  # fmt: skip
    return _Weights(slots, findings)


def _against_index(folder: Path, weights: _Weights) -> Iterator[Finding]:
    path = folder / _INDEXES[0]
    if not path.exists():
        return
    try:
        listed: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        yield _finding("save.bad-index", "error", "the index can't be read", path, str(error))
        return
    missing_files = sorted({file for file in listed.values() if not (folder / file).exists()})
    if missing_files:
        yield Finding(
            "save.missing-shard", "error", f"{len(missing_files)} weights files are missing",
            tuple(Evidence(str(folder / file), "named in the index, not there") for file in missing_files[:5]),
            cause="the save was cut short, or the folder was copied in part", fix=_REPAIR,
        )  # fmt: skip
    lost = [name for name, file in listed.items() if file not in missing_files and name not in weights.slots]
    if lost:
        yield _finding(
            "save.missing-tensor", "error", f"{len(lost)} tensors of the index are in no file", path, lost[0]
        )
    stray = [name for name in weights.slots if name not in listed]
    if stray:
        yield _finding(
            "save.stray-tensor", "warning", f"{len(stray)} tensors are not in the index: files of another save", path,
            f"{stray[0]} in {weights.slots[stray[0]][0]}",
        )  # fmt: skip


def _missing_weights(folder: Path, weights: _Weights, manifest: Manifest | None) -> Iterator[Finding]:
    if weights.slots or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin.index.json")):
        return
    if any((folder / name).exists() for name in ("pytorch_model.bin", "adapter_model.bin")):
        yield _finding(
            "save.pickled-weights", "info", "weights are pickled; only safetensors are looked into", folder, ""
        )
        return
    if manifest is not None and not any(entry.path.endswith(".safetensors") for entry in manifest.files):
        text = "saved on node-local disks: the weights are on rank 0's node"
        yield _finding(
            "save.weights-elsewhere", "info", "this node's part of a checkpoint has no weights", folder, text
        )
        return
    zero = sorted(path.name for path in folder.glob("global_step*"))
    if zero:
        yield Finding(
            "save.only-zero-files", "error", "there are ZeRO files but no model weights",
            (Evidence(str(folder / zero[0]), "holds the weights in DeepSpeed's format only"),),
            cause="stage3_gather_16bit_weights_on_model_save was false, or the save died before the weights",
            fix=_REPAIR,
        )  # fmt: skip
    else:
        yield _finding(
            "save.no-weights", "error", "there are no model weights", folder, "no *.safetensors, no ZeRO files"
        )


def _against_config(folder: Path, weights: _Weights) -> Iterator[Finding]:
    path = folder / "config.json"
    if not weights.slots or not path.exists():
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        yield _finding("save.bad-config", "error", "config.json can't be read", path, str(error))
        return
    shapes = {name: (slot.dtype, slot.shape) for name, (_, slot) in weights.slots.items() if slot.nbytes}
    problems = expected_problems(config, shapes)
    if problems:
        yield Finding(
            "save.not-this-model", "error", "tensors don't match config.json",
            tuple(Evidence(str(path), problem) for problem in problems[:8]),
            cause="weights were lost, or weights and config come from different saves", fix=_REPAIR,
        )  # fmt: skip


def _against_manifest(folder: Path, manifest: Manifest, progress: Progress) -> list[Finding]:
    findings: list[Finding] = []
    jobs: list[tuple[Path, int, int, str]] = []
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            findings.append(
                _finding(
                    "save.missing-file", "error", "a file of the manifest is missing", path, f"{entry.bytes:,} bytes"
                )
            )
        elif path.stat().st_size != entry.bytes:
            findings.append(
                _finding("save.wrong-size", "error", "a file has not the size it was saved with", path,
                         f"{path.stat().st_size:,} bytes, saved with {entry.bytes:,}")
            )  # fmt: skip
        else:
            jobs += [(path, extent.offset, extent.length, extent.sha256) for extent in entry.extents]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib lets go of the interpreter lock
        for job, actual in zip(jobs, pool.map(lambda job: _hash(job[0], job[1], job[2]), jobs), strict=True):
            path, offset, length, expected = job
            progress(length)
            if actual != expected:
                findings.append(
                    Finding(
                        "save.checksum", "error", "bytes changed since they were saved",
                        (Evidence(str(path), f"bytes {offset:,} to {offset + length:,}: sha256 {actual[:16]}…, "
                                             f"saved {expected[:16]}…"),),
                        cause="a disk or copy fault, or something rewrote the file after the save",
                        fix="Take an older checkpoint, or copy this one again from where it was whole.",
                    )
                )  # fmt: skip
    return findings


def _hash(path: Path, offset: int, length: int) -> str:
    try:
        with read_once(path, offset, length) as fd:
            return hash_range(fd, offset, length).sha256
    except OSError as error:
        return f"unreadable ({error})"


def _holes(folder: Path, weights: _Weights, progress: Progress) -> Iterator[Finding]:
    """Matrices with a long run of zero bytes: what a rank that never wrote, or a node-local disk, leaves behind."""
    zeros = bytes(_HOLE_BYTES)
    for name, (file, slot) in sorted(weights.slots.items()):
        if slot.nbytes < 2 * _HOLE_BYTES or len(slot.shape) < 2:
            progress(slot.nbytes)
            continue
        with read_once(folder / file) as fd:
            for start in range(slot.offset, slot.offset + slot.nbytes - _HOLE_BYTES + 1, 64 * _HOLE_BYTES):
                block = os.pread(fd, min(64 * _HOLE_BYTES, slot.offset + slot.nbytes - start), start)
                progress(len(block))
                found = block.find(zeros)
                if found >= 0:
                    yield Finding(
                        "save.zero-hole", "error", "a weight matrix has a hole of zeros",
                        (Evidence(str(folder / file), f"{name}: zeros from byte {start + found:,} on"),),
                        cause="a rank's part was never written: node-local disks, or a save cut short",
                        fix=_REPAIR,
                    )  # fmt: skip
                    break


def _finding(
    id: str, severity: Severity, title: str, where: Path, text: str, cause: str = "", fix: str = _REPAIR
) -> Finding:
    return Finding(id, severity, title, (Evidence(str(where), text),), cause, fix if severity == "error" else "")
