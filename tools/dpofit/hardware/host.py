"""How much RAM a job may use on this machine: physical memory, bounded by the cgroups it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostRam:
    """RAM in bytes and what sets it: physical memory, or the file of the tightest cgroup limit."""

    ram_bytes: int
    source: str


def read_host_ram() -> HostRam:
    """RAM a process started here may use."""
    import psutil

    return bounded_ram(psutil.virtual_memory().total, Path("/"))


def bounded_ram(physical_bytes: int, root: Path) -> HostRam:
    """`physical_bytes`, or the lowest memory limit of this process's cgroup and its ancestors under `root`."""
    tightest = HostRam(physical_bytes, "physical memory")
    for path in _limit_files(root):
        limit_bytes = _read_limit(path)
        if limit_bytes is not None and limit_bytes < tightest.ram_bytes:
            tightest = HostRam(limit_bytes, f"cgroup limit {path}")
    return tightest


def _limit_files(root: Path) -> Iterator[Path]:
    """The limit files of this process's cgroup and every ancestor, for cgroup v2 and v1.

    Inside a container the path in /proc/self/cgroup is often the host's and absent here; the walk upward
    still ends at the mount itself, where the container's own limit then lies.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":  # v2, possibly mounted beside v1
            for mount in (mounts, mounts / "unified"):
                yield from _upward(mount, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _upward(mounts / "memory", path, "memory.limit_in_bytes")


def _upward(mount: Path, path: str, name: str) -> Iterator[Path]:
    folder = mount / path.lstrip("/")
    yield folder / name
    while folder != mount and mount in folder.parents:
        folder = folder.parent
        yield folder / name


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit; v1 writes a number above any RAM
