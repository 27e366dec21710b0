"""`--host-ram auto` is what this process may really use, not what is soldered in."""

from __future__ import annotations

from pathlib import Path

import psutil

from dpofit.hardware.host import bounded_ram, read_host_ram

GIB = 2**30


def tree(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_cgroups_it_is_the_physical_memory(tmp_path) -> None:
    assert bounded_ram(64 * GIB, tmp_path).ram_bytes == 64 * GIB
    assert bounded_ram(64 * GIB, tmp_path).source == "physical memory"


def test_the_lowest_limit_of_a_v2_cgroup_and_its_ancestors_counts(tmp_path) -> None:
    root = tree(
        tmp_path,
        "0::/slurm/job_7/step_0\n",
        {"slurm/memory.max": "max", "slurm/job_7/memory.max": f"{32 * GIB}", "slurm/job_7/step_0/memory.max": "max"},
    )
    ram = bounded_ram(64 * GIB, root)
    assert ram.ram_bytes == 32 * GIB
    assert ram.source.endswith("slurm/job_7/memory.max")


def test_a_v1_limit_counts(tmp_path) -> None:
    root = tree(
        tmp_path,
        "4:cpu,cpuacct:/x\n9:memory:/docker/abc\n",
        {"memory/docker/abc/memory.limit_in_bytes": f"{16 * GIB}\n"},
    )
    assert bounded_ram(64 * GIB, root).ram_bytes == 16 * GIB


def test_a_container_that_sees_the_hosts_path_still_finds_its_own_limit(tmp_path) -> None:
    root = tree(tmp_path, "9:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": f"{8 * GIB}"})
    assert bounded_ram(64 * GIB, root).ram_bytes == 8 * GIB


def test_v1s_number_for_no_limit_changes_nothing(tmp_path) -> None:
    root = tree(tmp_path, "9:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"})
    assert bounded_ram(64 * GIB, root).ram_bytes == 64 * GIB


def test_this_machine_gives_no_more_than_its_physical_memory() -> None:
    assert 0 < read_host_ram().ram_bytes <= psutil.virtual_memory().total
