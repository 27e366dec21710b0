"""Decides whether a checkpoint is whole: sizes, checksums, every tensor present once, dtype and shape against config.

Reads safetensors headers, JSON and raw bytes only: no torch, nothing is unpickled, nothing leaves the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from dpofit.findings import Evidence, Finding, Severity
from dpofit.train.guard.content import Progress, Task, could_hold_zeros, problems, torch_records
from dpofit.train.guard.folders import FINAL_NEW, FINAL_PREVIOUS
from dpofit.train.guard.manifest import MANIFEST_NAME, Manifest, read_manifest
from dpofit.train.guard.safetensors_layout import TensorSlot, read_json_object, read_layout, read_weight_map
from dpofit.train.guard.shapes import expected_problems

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_REPAIR = "Write a Hugging Face folder from the ZeRO files: dpofit repair CHECKPOINT OUT."
_OLDER = "Take an older checkpoint, or copy this one again from where it was whole."
_SHOWN = 5  # pieces of evidence of one kind; a folder of 10,000 shards may lack them all
_TORCH_FILES = (".pt", ".pth", ".bin")
_SMALL_MATRIX_BYTES = 1 << 17  # a hole of 64 KiB in less says nothing


@dataclass(frozen=True, slots=True)
class _Weights:
    """All tensors that the folder's safetensors files hold, by name and file."""

    slots: dict[str, tuple[str, TensorSlot]]
    findings: list[Finding]


def check_checkpoint(folder: Path, progress: Progress = lambda nbytes: None) -> list[Finding]:
    """Findings about the checkpoint in `folder`; none of severity error means that it is whole, as far as it tells.

    With a manifest every byte is checked; without one, structure, tensors, zero-filled holes and the CRCs that torch
    writes into its own files are.
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
        findings += _without_manifest(folder, weights, progress)
    return findings


def total_bytes(folder: Path) -> int:
    """Bytes that `check_checkpoint` will read at most, for a progress bar."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _interrupted(folder: Path) -> Iterator[Finding]:
    left = [name for name in (FINAL_NEW, FINAL_PREVIOUS) if (folder / name).is_dir()]
    if not left:
        return
    evidence = tuple(Evidence(str(folder / name), "is still there") for name in left)
    if (folder / FINAL_NEW / MANIFEST_NAME).exists():
        yield Finding(
            "save.final-interrupted", "error" if (folder / FINAL_PREVIOUS).is_dir() else "warning",
            "a final save was killed while it moved its files in", evidence,
            cause="the process died between the first and the last rename of the save",
            fix="The next guarded save into this folder finishes it; or copy it out whole: dpofit repair FOLDER OUT.",
        )  # fmt: skip
    else:  # nothing has been moved yet, or everything has
        yield Finding(
            "save.final-interrupted", "warning", "a killed save left files that nothing reads", evidence,
            fix="The next guarded save into this folder removes them.",
        )  # fmt: skip


def _read_weights(folder: Path) -> _Weights:
    slots: dict[str, tuple[str, TensorSlot]] = {}
    twice: list[Evidence] = []
    findings: list[Finding] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            layout, _ = read_layout(path)
        except (ValueError, OSError) as error:
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
                twice.append(_evidence(path, f"{slot.name} is also in {slots[slot.name][0]}"))
            slots[slot.name] = (path.name, slot)
    if twice:
        findings.append(
            Finding(
                "save.duplicate-tensor", "error", f"{len(twice)} tensors are stored twice", tuple(twice[:_SHOWN]),
                cause="files of two saves lie in one folder", fix="Keep the files of one save, by their dates.",
            )
        )  # fmt: skip
    empty = [(file, slot) for file, slot in slots.values() if slot.nbytes == 0]
    if empty:
        findings.append(
            Finding(
                "save.empty-tensors", "error", f"{len(empty)} tensors have no elements",
                tuple(_evidence(folder / file, f"{slot.name} is {list(slot.shape)}") for file, slot in empty[:_SHOWN]),
                cause="saved under ZeRO-3 without gathering: each rank's placeholder was written instead of the weight",
                fix=_REPAIR,
            )
        )  # fmt: skip
    return _Weights(slots, findings)


def _against_index(folder: Path, weights: _Weights) -> Iterator[Finding]:
    for name in _INDEXES:
        path = folder / name
        if not path.exists() and not path.is_symlink():
            continue
        try:
            listed = read_weight_map(path)
        except (ValueError, OSError) as error:
            yield _finding("save.bad-index", "error", "the index can't be read", path, str(error))
            continue
        missing = {file for file in listed.values() if not (folder / file).is_file()}
        if missing:
            yield Finding(
                "save.missing-shard", "error", f"{len(missing)} weights files are missing",
                tuple(_evidence(folder / file, "named in the index, not there") for file in sorted(missing)[:_SHOWN]),
                cause="the save was cut short, or the folder was copied in part", fix=_REPAIR,
            )  # fmt: skip
        if name != _INDEXES[0]:  # pickled shards aren't looked into
            continue
        elsewhere = [
            tensor
            for tensor, file in listed.items()
            if file not in missing and weights.slots.get(tensor, ("",))[0] != file
        ]
        if elsewhere:
            yield _finding(
                "save.missing-tensor", "error", f"{len(elsewhere)} tensors are not in the file that the index names",
                path, elsewhere[0],
            )  # fmt: skip
        stray = [tensor for tensor in weights.slots if tensor not in listed]
        if stray:
            yield _finding(
                "save.stray-tensor", "warning", f"{len(stray)} tensors are not in the index: files of another save",
                path, f"{stray[0]} in {weights.slots[stray[0]][0]}",
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
    if not weights.slots or not (path.exists() or path.is_symlink()):
        return
    try:
        config = read_json_object(path)
    except (ValueError, OSError) as error:
        yield _finding("save.bad-config", "error", "config.json can't be read", path, str(error))
        return
    shapes = {name: (slot.dtype, slot.shape) for name, (_, slot) in weights.slots.items() if slot.nbytes}
    wrong = expected_problems(config, shapes)
    if wrong:
        yield Finding(
            "save.not-this-model", "error", "tensors don't match config.json",
            tuple(_evidence(path, problem) for problem in wrong[:8]),
            cause="weights were lost, or weights and config come from different saves", fix=_REPAIR,
        )  # fmt: skip


def _against_manifest(folder: Path, manifest: Manifest, progress: Progress) -> Iterator[Finding]:
    missing: list[Evidence] = []
    tasks: list[Task] = []
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            missing.append(_evidence(path, f"{entry.bytes:,} bytes"))
        elif path.stat().st_size != entry.bytes:
            yield _finding(
                "save.wrong-size", "error", "a file has not the size it was saved with", path,
                f"{path.stat().st_size:,} bytes, saved with {entry.bytes:,}",
            )  # fmt: skip
        else:
            for extent in entry.extents:
                label = f"bytes {extent.offset:,} to {extent.offset + extent.length:,}"
                tasks.append(Task(path, label, extent.offset, extent.length, "sha256", extent.sha256))
    if missing:
        yield Finding(
            "save.missing-file", "error", f"{len(missing)} files of the manifest are missing",
            tuple(missing[:_SHOWN]), fix=_REPAIR,
        )  # fmt: skip
    cause = "a disk or copy fault, or something rewrote the file after the save"
    yield from _by_file("save.checksum", "error", "bytes changed since they were saved", tasks, progress, cause, _OLDER)


def _without_manifest(folder: Path, weights: _Weights, progress: Progress) -> Iterator[Finding]:
    """What the stock save's files tell of themselves: holes of zeros in matrices, CRCs in torch's own files."""
    surely: list[Task] = []
    maybe: list[Task] = []
    sizes = {file: (folder / file).stat().st_size for file, _ in weights.slots.values()}
    for name, (file, slot) in sorted(weights.slots.items(), key=lambda item: (item[1][0], item[1][1].offset)):
        if slot.offset + slot.nbytes > sizes[file]:
            continue  # the file is cut short, which has been said
        if slot.nbytes >= _SMALL_MATRIX_BYTES and len(slot.shape) > 1:
            task = Task(folder / file, name, slot.offset, slot.nbytes, "zeros")
            (maybe if could_hold_zeros(name) else surely).append(task)
    title, cause = (
        "a weight matrix has a hole of zeros",
        "a rank's part was never written: node-local disks, a save cut short",
    )
    yield from _by_file("save.zero-hole", "error", title, surely, progress, cause, _REPAIR)
    cause += ", or rows of the vocabulary that nothing trains, or an adapter before its first step"
    yield from _by_file("save.zero-hole", "warning", title, maybe, progress, cause, "")

    records: list[Task] = []
    cause = "the save or a copy was cut short, or the disk is at fault"
    for path in sorted(folder.rglob("*")):
        if path.suffix in _TORCH_FILES and path.is_file():
            try:
                records += torch_records(path)
            except (ValueError, OSError) as error:
                yield _finding("save.torch-file", "error", "a torch file is damaged", path, str(error), cause, _OLDER)
    yield from _by_file("save.torch-file", "error", "a torch file is damaged", records, progress, cause, _OLDER)


def _by_file(
    id: str, severity: Severity, title: str, tasks: list[Task], progress: Progress, cause: str, fix: str
) -> Iterator[Finding]:
    """One finding a file for all its tasks that fail."""
    for path, found in groupby(problems(tasks, progress), key=lambda pair: pair[0].path):
        evidence = [_evidence(path, problem) for _, problem in found]
        yield Finding(id, severity, title, tuple(evidence[:_SHOWN]), cause, fix)


def _evidence(where: Path, text: str) -> Evidence:
    """Names in a damaged file can hold anything: nothing unprintable reaches the terminal."""
    return Evidence(_printable(str(where)), _printable(text))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _finding(
    id: str, severity: Severity, title: str, where: Path, text: str, cause: str = "", fix: str = _REPAIR
) -> Finding:
    return Finding(id, severity, title, (_evidence(where, text),), cause, fix if severity == "error" else "")
