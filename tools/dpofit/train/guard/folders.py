"""How a save becomes visible: staged beside its place, then renamed. What a killed save left is settled here too."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from dpofit.train.guard.durable import fsync_folder
from dpofit.train.guard.manifest import MANIFEST_NAME, looks_whole, read_manifest

STAGING = ".dpofit-saving"  # in the run folder; holds checkpoint-N while it is written
TRASH = ".dpofit-trash"  # in the run folder; what is being deleted
FINAL_NEW = ".dpofit-new"  # in the folder of a final save: the new files
FINAL_PREVIOUS = ".dpofit-prev"  # in the folder of a final save: the files they replace
REPAIR_BACKEND = "repair"  # what the manifest of a repaired folder says wrote it

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = re.compile(r"(\w+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


def checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """`(step, folder)` of every checkpoint-N, oldest step first."""
    found = []
    with suppress(FileNotFoundError):
        for path in run_folder.iterdir():
            match = _CHECKPOINT.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    return sorted(found)


def newest_resumable(run_folder: Path) -> Path | None:
    """The newest whole checkpoint. Where none has a manifest, the newest one that the stock code finished.

    transformers writes trainer_state.json last (5.5.4 trainer.py:3080), so one without it was cut short.
    """
    found = checkpoints(run_folder)
    for _, path in reversed(found):
        if looks_whole(path):
            return path
    for _, path in reversed(found):
        if not (path / MANIFEST_NAME).exists() and (path / "trainer_state.json").is_file():
            return path
    return None


def commit_checkpoint(staged: Path, place: Path) -> None:
    """Move a fully staged checkpoint to its place; one that was there before goes only once the new one is in."""
    if place.exists():
        if not _exchange(staged, place):
            trash(place)
            staged.rename(place)
    else:
        staged.rename(place)
    fsync_folder(place.parent)
    fsync_folder(staged.parent)
    remove_tree(staged.parent)


def rotate(run_folder: Path, limit: int | None, best: str | None) -> list[Path]:
    """Delete the oldest whole checkpoints until `limit` are left; return them.

    Never deletes the newest whole one, the best one, or one without a manifest (we can't know what it is worth).
    """
    if limit is None or limit <= 0:
        return []
    whole = [path for _, path in checkpoints(run_folder) if looks_whole(path)]
    if len(whole) <= limit:
        return []
    protected = {whole[-1]}
    if best is not None:
        protected |= {path for path in whole if path.name == Path(best).name}
    excess = len(whole) - max(limit, len(protected))
    doomed = [path for path in whole if path not in protected][: max(excess, 0)]
    for path in doomed:
        trash(path)
    if doomed:
        remove_tree(run_folder / TRASH)
    return doomed


def trash(path: Path) -> None:
    """Take a checkpoint out of sight in one step, so that half a deletion never looks like a checkpoint."""
    bin_folder = path.parent / TRASH
    bin_folder.mkdir(exist_ok=True)
    target = bin_folder / path.name
    serial = 0
    while target.exists():
        serial += 1
        target = bin_folder / f"{path.name}.{serial}"
    path.rename(target)
    fsync_folder(path.parent)


def recover(run_folder: Path) -> None:
    """Finish or remove what a killed save left behind. Call while no save is under way."""
    for _, staged in checkpoints(run_folder / STAGING):
        place = run_folder / staged.name
        if looks_whole(staged) and not place.exists():
            staged.rename(place)
            fsync_folder(run_folder)
    remove_tree(run_folder / STAGING)
    remove_tree(run_folder / TRASH)
    settle_final_save(run_folder)


def settle_final_save(folder: Path) -> None:
    """Bring a final save to its end from wherever it is: forward if it is fully staged, else the old set stays.

    Order: every old file to .dpofit-prev, every new file in, the manifest last, then .dpofit-prev goes. At no moment
    do new and old weights lie side by side.
    """
    new, previous = folder / FINAL_NEW, folder / FINAL_PREVIOUS
    manifest = read_manifest(new) if new.is_dir() else None
    if manifest is None:
        remove_tree(new)
        remove_tree(previous)
        return
    staged = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()} - {MANIFEST_NAME}
    names = {entry.path for entry in manifest.files} | staged  # the model card is staged and not in the manifest
    # A shard, index or single file of an earlier save would be loaded beside, or instead of, the new ones.
    stems = {_stem(name) for name in names} - {None}
    started = previous.is_dir()
    previous.mkdir(exist_ok=True)
    for path in sorted(folder.iterdir()):
        name = path.name
        # Once the swap has begun, a name that is no longer in .dpofit-new is a new file that has arrived.
        arrived = started and name in names and not (new / name).exists()
        if path.is_file() and not arrived and (name in names or name == MANIFEST_NAME or _stem(name) in stems):
            path.rename(previous / name)
    fsync_folder(folder)
    for name in sorted(names):
        if (new / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).rename(folder / name)
    fsync_folder(folder)
    (new / MANIFEST_NAME).rename(folder / MANIFEST_NAME)
    fsync_folder(folder)
    remove_tree(new)
    remove_tree(previous)


def is_left_by_repair(out: Path) -> bool:
    """Whether a folder holds nothing but what a killed `dpofit repair` left: it may be written again."""
    if not any((out / name).is_dir() for name in (FINAL_NEW, FINAL_PREVIOUS)):
        return False
    try:
        manifest = read_manifest(out / FINAL_NEW) or read_manifest(out)
    except ValueError:
        return False
    if manifest is None:
        return [path.name for path in out.iterdir()] == [FINAL_NEW]
    return manifest.backend == REPAIR_BACKEND


def _stem(name: str) -> str | None:
    match = _WEIGHTS.fullmatch(name)
    return match[1] if match else None


def remove_tree(path: Path) -> None:
    """Delete a folder of ours, as far as it goes; what can't be deleted now is tried again at the next save."""
    shutil.rmtree(path, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (renameat2 RENAME_EXCHANGE); False where the file system can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
