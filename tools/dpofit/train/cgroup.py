"""What the memory cgroup of this process uses, may use, and how often it killed: cgroup v2 and v1, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # v1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest limited group among this process's and its ancestors, else the nearest that counts at all."""

    used_bytes: int | None
    limit_bytes: int | None


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory:
    """Use and limit of the group that binds."""
    nearest = CgroupMemory(None, None)
    tightest: CgroupMemory | None = None
    for folder, v2 in memory_groups(root):
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        if limit is not None and limit >= _UNLIMITED:
            limit = None
        if used is None:
            continue
        group = CgroupMemory(used, limit)
        if nearest.used_bytes is None:
            nearest = group
        if limit is not None and (tightest is None or tightest.limit_bytes is None or limit < tightest.limit_bytes):
            tightest = group
    return tightest or nearest


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for want of memory in this process's group and its ancestors."""
    counts = []
    for folder, v2 in memory_groups(root):
        for line in _text(folder / ("memory.events" if v2 else "memory.oom_control")).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                counts.append(int(value))
    return max(counts) if counts else None  # an ancestor's counter includes its children's


def memory_groups(root: Path) -> Iterator[tuple[Path, bool]]:
    """`(folder, is v2)` of this process's memory cgroup and its ancestors, innermost first.

    In a container the path in /proc/self/cgroup is often the host's and absent here; the walk then still ends at
    the mount, where the container's own files lie.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            folder = mount / path.lstrip("/")
            yield folder, hierarchy == "0"
            while folder != mount and mount in folder.parents:
                folder = folder.parent
                yield folder, hierarchy == "0"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
