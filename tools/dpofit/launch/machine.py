"""What preflight knows about one machine (or container): read once, then only looked at."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpofit.errors import Problem
from dpofit.launch.inventory import Card, Inventory, Link, read_inventory

# What decides where ranks and connections go; the rest of the environment is nobody's business.
_TOLD = re.compile(
    r"(?:NCCL|GLOO|CUDA|PET|RDZV)_[A-Z0-9_]+|MASTER_(?:ADDR|PORT)|N?NODES|NNODES|NODE_RANK|NPROC_PER_NODE|RANK|"
    r"LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|M(?:IN|AX)_NNODES|FORCE_TORCHRUN|"
    r"SLURM_(?:JOB_ID|JOB_NODELIST|JOB_NUM_NODES|NODEID|NTASKS|NTASKS_PER_NODE|LOCALID|PROCID|GPUS_ON_NODE)"
)
_PACKAGES = ("torch", "llamafactory", "transformers", "deepspeed", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    mac: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as a process on it sees it."""

    hostname: str
    boot_id: str
    inventory: Inventory
    interfaces: tuple[Interface, ...] = ()
    in_container: bool = False
    nvidia_devices: int = 0  # /dev/nvidia0, /dev/nvidia1, … in this container
    shm_bytes: int | None = None
    memlock_bytes: int | None = None  # None: unlimited
    infiniband: tuple[str, ...] = ()
    cores: int = 1
    compilers: tuple[str, ...] = ()  # of g++/c++, ninja: those found
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None  # "12.8"; None: no torch, or a CPU build
    torch_folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0

    @property
    def nccl_host_id(self) -> str:
        """What NCCL takes for the host's identity: NCCL_HOSTID, else hostname and boot id (nccl misc/utils.cc
        getHostHash)."""
        return self.environment.get("NCCL_HOSTID") or f"{self.hostname}/{self.boot_id}"

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(address for interface in self.interfaces for address in interface.addresses)


def read_machine(environment: Mapping[str, str] | None = None) -> Machine:
    """This machine, in well under a second; nothing here initialises CUDA or opens a connection."""
    environment = os.environ if environment is None else environment
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        hostname=socket.gethostname(),
        boot_id=_text(Path("/proc/sys/kernel/random/boot_id")),
        inventory=read_inventory(),
        interfaces=_interfaces(),
        in_container=_in_container(),
        nvidia_devices=sum(1 for path in Path("/dev").glob("nvidia[0-9]*")),
        shm_bytes=_size_of(Path("/dev/shm")),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        cores=len(os.sched_getaffinity(0)),
        compilers=tuple(name for name in ("c++", "g++", "ninja") if shutil.which(name)),
        versions=_versions(),
        torch_cuda=_torch_cuda(),
        torch_folder=torch_folder(),
        environment={name: value for name, value in environment.items() if _TOLD.fullmatch(name)},
        pid=os.getpid(),
    )


def machine_json(machine: Machine) -> dict[str, Any]:
    """Plain values, to be gathered over the network."""
    return asdict(machine)


def machine_from_json(document: Mapping[str, Any]) -> Machine:
    """The inverse of `machine_json`; lists become tuples again."""
    raw = dict(document)
    inventory = dict(raw.pop("inventory"))
    cards = tuple(
        Card(**{**card, "users": tuple(tuple(user) for user in card.get("users", ()))})
        for card in inventory.pop("cards")
    )
    links = tuple(Link(**link) for link in inventory.pop("links", ()))
    cuda = inventory.pop("cuda_driver", None)
    interfaces = tuple(
        Interface(entry["name"], tuple(entry["addresses"]), entry.get("mac", "")) for entry in raw.pop("interfaces", ())
    )
    for name in ("infiniband", "compilers"):
        raw[name] = tuple(raw.get(name, ()))
    return Machine(
        inventory=Inventory(cards=cards, cuda_driver=tuple(cuda) if cuda else None, links=links, **inventory),
        interfaces=interfaces, **raw,
    )  # fmt: skip


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in up:
            continue
        ips = tuple(a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        mac = next((a.address for a in addresses if a.family == psutil.AF_LINK), "")
        found.append(Interface(name, ips, mac))
    return tuple(found)


def _in_container() -> bool:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ:
        return True
    return bool(re.search(r"docker|containerd|kubepods|libpod", _text(Path("/proc/1/cgroup"))))


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def torch_folder() -> str:
    """Where torch is installed, without importing it; empty without torch."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    return next(iter(spec.submodule_search_locations), "") if spec and spec.submodule_search_locations else ""


def missing_stack(deepspeed: bool) -> list[Problem]:
    """What training needs and this environment lacks; found without importing it."""
    import importlib.util

    right = "Install the training stack: bash scripts/install.sh VENV, in dpofit's repository."
    packages = ("torch", "llamafactory", *(["deepspeed"] if deepspeed else []))
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return [Problem("this environment", ", ".join(absent), "not installed", right)] if absent else []


def _torch_cuda() -> str | None:
    """The CUDA version torch was built for, read from its version.py without importing it."""
    folder = torch_folder()
    text = _text(Path(folder) / "version.py") if folder else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)['\"]", text, re.M)
    return match[1] if match else None


def _size_of(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
