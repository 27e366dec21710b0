"""The file formats: safetensors headers like the library's, torch files that torch reads, writes that are all there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpofit.train.guard.config import GuardConfig, read_config
from dpofit.train.guard.machine import is_memory_backed, memory_headroom
from dpofit.train.guard.manifest import uncovered
from dpofit.train.guard.safetensors_layout import lay_out, read_layout
from dpofit.units import GIB, MIB

pytestmark = pytest.mark.stack

DTYPES = ["float32", "bfloat16", "float16", "int64", "uint8", "bool", "float64", "float8_e4m3fn"]
names = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda n: n != "__metadata__"
)
tensors = st.dictionaries(
    names, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(tensors)
def test_headers_are_the_librarys_byte_for_byte(described: dict[str, tuple[str, list[int]]]) -> None:
    import torch
    from safetensors.torch import save

    from dpofit.train.guard.plan import dtype_name, dtype_ranks

    state = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in described.items()}
    ours = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()}
    ranks = dtype_ranks(tuple(sorted({dtype for dtype, _ in ours.values()})))
    layout = lay_out(ours, {"format": "pt"}, ranks.__getitem__)
    blob = save(state, metadata={"format": "pt"})
    assert blob[: len(layout.header)] == layout.header
    assert len(blob) == layout.file_bytes


def test_a_header_read_back_says_the_same(tmp_path: Path) -> None:
    layout = lay_out({"a": ("BF16", (2, 3)), "b": ("F32", (5,))}, {"format": "pt"}, {"BF16": 1, "F32": 2}.__getitem__)
    (tmp_path / "x.safetensors").write_bytes(layout.header + bytes(layout.file_bytes - len(layout.header)))
    assert read_layout(tmp_path / "x.safetensors") == (layout, {"format": "pt"})


def test_torch_reads_a_bounded_torch_file(tmp_path: Path) -> None:
    import torch

    from dpofit.train.guard.torch_file import save_bounded

    shared = torch.randn(1000)
    state = {
        "flat": shared,
        "view": shared[10:20],
        "half": torch.randn(3, 4).bfloat16(),
        "empty": torch.empty(0),
        "step": 7,
    }
    extents = save_bounded(state, tmp_path, "state.pt", GuardConfig())
    assert uncovered(extents, (tmp_path / "state.pt").stat().st_size) == []
    for options in ({}, {"mmap": True}):
        loaded: Any = torch.load(tmp_path / "state.pt", weights_only=True, **options)
        assert all(torch.equal(loaded[key], state[key]) for key in ("flat", "view", "half", "empty"))
        assert loaded["step"] == 7
        assert loaded["view"].untyped_storage().data_ptr() == loaded["flat"].untyped_storage().data_ptr()


def test_uncovered_lists_the_gaps() -> None:
    from dpofit.train.guard.manifest import Extent

    assert uncovered([Extent(5, 5, ""), Extent(20, 10, "")], 40) == [(0, 5), (10, 10), (30, 10)]


def test_the_tightest_cgroup_above_us_is_the_limit(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 999999999 kB\nMemAvailable: 67108864 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    for place, limit, used in ((groups / "pod", 8 * GIB, 5 * GIB), (groups / "pod" / "container", 16 * GIB, GIB)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 2}\nactive_file 0\n")
    headroom = memory_headroom(proc, groups)
    assert headroom.available_bytes == 8 * GIB - 5 * GIB + GIB // 2
    assert headroom.limited_by.endswith("pod")


def test_version_1_cgroups_count_too(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable: 67108864 kB\n")
    (proc / "self" / "cgroup").write_text("4:cpu:/x\n9:memory:/job\n")
    (groups / "memory" / "job").mkdir(parents=True)
    (groups / "memory" / "job" / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (groups / "memory" / "job" / "memory.usage_in_bytes").write_text(str(GIB))
    assert memory_headroom(proc, groups).available_bytes == GIB


def test_tmpfs_is_memory(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/a\\040b tmpfs rw 0 0\n")
    assert is_memory_backed(tmp_path / "a b" / "out", mounts)
    assert not is_memory_backed(tmp_path / "a", mounts)


def test_settings_are_checked_all_at_once() -> None:
    from dpofit.errors import BadInput

    env = {"DPOFIT_GUARD": "fast", "DPOFIT_GUARD_MEMORY": "lots", "DPOFIT_GUARD_TIMEOUT": "-1"}
    with pytest.raises(BadInput) as bad:
        read_config(env)
    assert [problem.key for problem in bad.value.problems] == [
        "DPOFIT_GUARD",
        "DPOFIT_GUARD_MEMORY",
        "DPOFIT_GUARD_TIMEOUT",
    ]


@pytest.mark.parametrize(("memory", "chunk"), [("64MiB", 16 * MIB), ("256MiB", 64 * MIB), ("4GiB", 64 * MIB)])
def test_chunks_are_a_quarter_of_the_cap_and_a_power_of_two(memory: str, chunk: int) -> None:
    assert read_config({"DPOFIT_GUARD_MEMORY": memory}).chunk_bytes == chunk
