"""Findings about the machine around the GPUs: shared memory, locked memory, compilers, versions."""

from __future__ import annotations

from collections.abc import Iterator

from dpofit.findings import Evidence, Finding
from dpofit.launch.build_lock import left_locks, operator_cache
from dpofit.launch.machine import Machine
from dpofit.launch.starts import Start
from dpofit.recipe.load import ReadRecipe
from dpofit.units import GIB, MIB

DOCKER_SHM_BYTES = 64 * MIB  # docker's default for /dev/shm
SMALL_SHM_BYTES = GIB


def host_findings(machine: Machine, start: Start, found: ReadRecipe | None) -> Iterator[Finding]:
    """Limits that let a job start and end it later."""
    ranks = start.processes or len(machine.inventory.cards)
    if machine.shm_bytes is not None and ranks > 1 and machine.shm_bytes < SMALL_SHM_BYTES:
        tiny = machine.shm_bytes <= DOCKER_SHM_BYTES
        yield Finding(
            "launch.shm-small", "error" if tiny else "warning",
            f"/dev/shm has {machine.shm_bytes / MIB:,.0f} MiB for {ranks} ranks",
            (Evidence("/dev/shm", f"{machine.shm_bytes / MIB:,.0f} MiB"),),
            "NCCL's shared-memory transport and dataloader workers put their buffers there: \"ncclSystemError\", or a "
            "bus error. 64 MiB is docker's default.",
            "docker run --ipc=host or --shm-size=16g; in Kubernetes an emptyDir of medium Memory at /dev/shm.",
        )  # fmt: skip
    if machine.memlock_bytes is not None and machine.infiniband and machine.memlock_bytes < GIB:
        yield Finding(
            "launch.memlock-small", "warning",
            f"only {machine.memlock_bytes / MIB:,.0f} MiB may be locked, with InfiniBand here",
            (Evidence("ulimit -l", f"{machine.memlock_bytes // 1024} KiB"),
             Evidence("/sys/class/infiniband", ", ".join(machine.infiniband))),
            "RDMA locks its buffers: \"ibv_reg_mr failed … Cannot allocate memory\".",
            "ulimit -l unlimited (limits.conf, docker --ulimit memlock=-1, IPC_LOCK in Kubernetes).",
        )  # fmt: skip
    if found is not None and found.recipe is not None:
        yield from _cpu_adam(machine, found)
        yield from _build_locks(start, found)
    if machine.inventory.cards:
        nccl = machine.versions.get("nvidia-nccl-cu13") or machine.versions.get("nvidia-nccl-cu12") or "torch's own"
        cuda = ".".join(map(str, machine.inventory.cuda_driver)) if machine.inventory.cuda_driver else "unknown"
        torch = machine.versions.get("torch", "not installed")
        yield Finding(
            "launch.versions", "info",
            f"driver {machine.inventory.driver} (CUDA {cuda}), torch {torch} (CUDA {machine.torch_cuda}), NCCL {nccl}",
        )  # fmt: skip


def _build_locks(start: Start, found: ReadRecipe) -> Iterator[Finding]:
    recipe = found.recipe
    if recipe is None or recipe.zero is None or recipe.zero.offload_optimizer == "none":
        return
    for lock in left_locks(operator_cache(start.environment)):
        yield Finding(
            "launch.build-lock-left", "warning", f"a build that was killed left its lock: {lock.parent.name}",
            (Evidence(str(lock), "held open by no process of this user on this machine"),),
            "torch waits for the lock before it loads the operator, without a word and without end.",
            f"If nobody builds there on another machine: rm '{lock}'.",
        )  # fmt: skip


def _cpu_adam(machine: Machine, found: ReadRecipe) -> Iterator[Finding]:
    recipe = found.recipe
    assert recipe is not None
    if recipe.zero is None or recipe.zero.offload_optimizer == "none" or "deepspeed" not in machine.versions:
        return
    missing = []
    if not {"c++", "g++"} & set(machine.compilers):
        missing.append("a C++ compiler")
    if "ninja" not in machine.compilers:
        missing.append("ninja")
    if missing:
        yield Finding(
            "launch.cpu-adam-not-buildable", "error", f"offload needs {' and '.join(missing)} on this node",
            (Evidence("PATH", f"found: {', '.join(machine.compilers) or 'none'}"),),
            "DeepSpeed compiles CPUAdam on each node when training starts, after the model has been loaded.",
            "apt-get install g++; pip install ninja; or build ahead with DS_BUILD_CPU_ADAM=1 pip install deepspeed.",
        )  # fmt: skip
    if " " in machine.torch_folder:
        yield Finding(
            "launch.cpu-adam-not-buildable", "error", "offload can't be built: torch lies in a path with spaces",
            (Evidence("torch", machine.torch_folder),),
            "torch hands its folder to the linker unquoted (-L/a b/torch/lib, torch/utils/cpp_extension.py), so "
            "compiling CPUAdam fails when training starts, after the model has been loaded.",
            "Make the virtual environment in a path without spaces.",
        )  # fmt: skip
