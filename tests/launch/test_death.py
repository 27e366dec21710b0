"""What is said of an end: from exit code, signals, torchrun's own account, phases and the kernel's OOM counter."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dpofit.launch.death import Outcome, Phase, explain
from dpofit.train.cgroup import CgroupMemory, cgroup_memory, oom_kills
from dpofit.train.failures import Failed

PHASES = (Phase(0, "after step", 200, 10.0), Phase(1, "train", 201, 11.0))


def failed(exitcode: int, message: str = "", rank: int = 1, timestamp: int = 5) -> Failed:
    return Failed(rank, rank, 4242, exitcode, timestamp, message)


def told(failures: list[Failed], oom_killed: int | None = 0) -> Outcome:
    return explain(1, [], failures, PHASES, oom_killed)


def test_a_clean_end() -> None:
    assert explain(0, [], [], PHASES, 0) == Outcome(0, "finished", "finished")


def test_the_kernels_oom_killer_is_told_from_other_sigkills() -> None:
    by_kernel, by_someone = told([failed(-9)], oom_killed=1), told([failed(-9)], oom_killed=0)
    assert (by_kernel.cause, by_someone.cause) == ("host-memory", "killed")
    assert by_kernel.title == (
        "the kernel killed rank 1 for want of host memory (cgroup oom_kill went up by 1), last phase: train 201"
    )
    assert by_someone.title == "rank 1 was killed from outside by SIGKILL, last phase: train 201"


def test_without_a_counter_it_says_so() -> None:
    assert "no cgroup counter" in told([failed(-9)], oom_killed=None).title


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.76 GiB", "gpu-memory"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory", "host-memory"),
        (
            "DistNetworkError: The server socket has failed to listen (errno: 98 - Address already in use)",
            "port-in-use",
        ),
        (
            "DistBackendError: NCCL error: Duplicate GPU detected : rank 9 and rank 1 both on CUDA device",
            "duplicate-gpu",
        ),
        ("RuntimeError: CUDA error: invalid device ordinal", "too-few-gpus"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, Timeout(ms)=600000)", "peer-lost"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/x.json'", "missing-file"),
        ("SaveAborted: save aborted at weights: rank 0: OSError: x", "save-failed"),
        ("ZeroDivisionError: division by zero", "exception"),
    ],
)
def test_exceptions_have_a_cause(message: str, cause: str) -> None:
    assert told([failed(1, message)]).cause == cause


def test_the_first_failure_counts_not_those_it_brought_down() -> None:
    failures = [
        failed(-signal.SIGTERM, rank=0, timestamp=1),
        failed(1, "ValueError: late but first", rank=3, timestamp=9),
    ]
    assert told(failures).title.startswith("rank 3 failed")


def test_bus_error_points_at_shared_memory() -> None:
    assert told([failed(-signal.SIGBUS)]).cause == "shared-memory"


def test_a_closed_terminal_is_told_with_its_remedy() -> None:
    outcome = explain(1, [signal.SIGHUP], [], PHASES, 0)
    assert outcome.title.startswith("ended because dpofit received SIGHUP")
    assert "--detach" in outcome.advice


def test_v2_counter_and_limit_of_the_group_that_binds(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/one\n")
    outer = tmp_path / "sys/fs/cgroup/jobs"
    inner = outer / "one"
    inner.mkdir(parents=True)
    for folder, limit, used, kills in ((outer, "1000", "900", 3), (inner, "max", "400", 1)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
        (folder / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
    assert oom_kills(tmp_path) == 3
    assert cgroup_memory(tmp_path) == CgroupMemory(900, 1000)


def test_v1_counter_and_no_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/docker/abc\n")
    mount = tmp_path / "sys/fs/cgroup/memory"  # in the container the host's path is not there
    mount.mkdir(parents=True)
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712")
    (mount / "memory.usage_in_bytes").write_text("123")
    (mount / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
    assert cgroup_memory(tmp_path) == CgroupMemory(123, None)
