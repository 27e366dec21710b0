"""What this node has left for a save: memory under its cgroups, disk, and whether a folder is memory itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dpofit.units import KIB


@dataclass(frozen=True, slots=True)
class MemoryHeadroom:
    """`available_bytes` more can be used before something is killed; `limited_by` says by what."""

    available_bytes: int
    limited_by: str


def memory_headroom(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryHeadroom:
    """The least of MemAvailable and of limit minus usage of this process's cgroup and all its ancestors, v1 or v2.

    File pages count as usable: the kernel reclaims clean ones before it kills.
    """
    candidates = [MemoryHeadroom(_meminfo(proc / "meminfo", "MemAvailable"), "MemAvailable")]
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            candidates += _cgroup_headroom(folder, *names)
            if folder in (root, folder.parent):
                break
            folder = folder.parent
    return min(candidates, key=lambda headroom: headroom.available_bytes)


def _cgroup_headroom(folder: Path, limit: str, usage: str, *file_pages: str) -> list[MemoryHeadroom]:
    limit_text, usage_text = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not limit_text.isdigit() or not usage_text.isdigit() or int(limit_text) >= 1 << 60:  # "max", or v1's unlimited
        return []
    fields = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    reclaimable = sum(int(fields.get(name, 0)) for name in file_pages)
    return [MemoryHeadroom(int(limit_text) - int(usage_text) + reclaimable, f"cgroup {folder}")]


def is_memory_backed(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether `path` lies on tmpfs or ramfs, so that writing it uses memory."""
    best, kind = "", ""
    real = os.path.realpath(path)
    for line in _text(mounts).splitlines():
        fields = line.split()
        point = fields[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind in ("tmpfs", "ramfs")


def free_disk_bytes(path: Path) -> int:
    """Bytes that this user may still write at `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class PeakMemory:
    """The highest resident memory since `start`, above what it was then. None where the kernel doesn't tell.

    Resets the process's peak counter (proc(5), /proc/self/clear_refs, value 5).
    """

    def __init__(self) -> None:
        self._base: int | None = None

    def start(self) -> None:
        """Begin counting from now."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._base = _meminfo(Path("/proc/self/status"), "VmRSS")
        except OSError:
            self._base = None

    def extra_bytes(self) -> int | None:
        """Peak so far minus the start."""
        if self._base is None:
            return None
        return max(0, _meminfo(Path("/proc/self/status"), "VmHWM") - self._base)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _meminfo(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * KIB
    raise OSError(f"{path} has no {key}")
