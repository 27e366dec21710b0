"""Findings about GPUs: ranks against visible devices, how each launcher counts them, who else is on the cards."""

from __future__ import annotations

from collections.abc import Iterator

from dpofit.findings import Evidence, Finding
from dpofit.launch.inventory import visible_cards
from dpofit.launch.machine import Machine
from dpofit.launch.starts import Start
from dpofit.recipe.load import ReadRecipe
from dpofit.recipe.surroundings import card_advice
from dpofit.units import GIB, format_gib

BUSY_BYTES = GIB  # a driver and a display hold some hundred MiB; a process that trains holds more
_CVD = "CUDA_VISIBLE_DEVICES"


def device_findings(machine: Machine, start: Start, found: ReadRecipe | None) -> Iterator[Finding]:
    """In the order a launcher would meet them."""
    inventory = machine.inventory
    if not inventory.cards:
        yield _no_cards(machine)
        return
    visible = visible_cards(inventory, start.environment)
    asked = start.environment.get(_CVD)
    cards = Evidence("NVML", f"{len(inventory.cards)} GPUs: {_names(machine)}")
    if visible.invalid is not None:
        yield Finding(
            "launch.visible-devices-out-of-range", "error",
            f"{_CVD} names a GPU that is not here: {visible.invalid}",
            (Evidence(_CVD, str(asked)), cards),
            f"CUDA stops reading at the first entry it does not know and sees only {len(visible.cards)} GPUs.",
            f"Name devices 0 to {len(inventory.cards) - 1}, or leave it unset.",
        )  # fmt: skip
    if visible.twice:
        yield Finding(
            "launch.visible-devices-duplicate", "error", f"{_CVD} names a GPU twice: {', '.join(visible.twice)}",
            (Evidence(_CVD, str(asked)),), "CUDA then shows no GPU at all.", "Name each device once.",
        )  # fmt: skip
    if start.launcher == "deepspeed":
        yield from _deepspeed_launcher(machine, start, len(visible.cards))
    seen = len(inventory.cards) if start.launcher == "deepspeed" and start.filtered else len(visible.cards)
    yield from _counts(start, seen, cards, asked, found)
    yield from _busy(machine, start)
    if found is not None:
        kinds = dict.fromkeys((card.name, card.compute_capability) for card in visible.cards)
        yield from (issue.finding() for kind in kinds for issue in card_advice(found.settings, *kind))
    if inventory.cuda_driver and machine.torch_cuda:
        yield from _driver(machine)


def _counts(start: Start, seen: int, cards: Evidence, asked: str | None, found: ReadRecipe | None) -> Iterator[Finding]:
    processes = start.processes
    here = Evidence(_CVD, "unset" if asked is None else asked)
    if processes is not None and processes > seen:
        yield Finding(
            "launch.more-ranks-than-gpus", "error", f"{processes} ranks on {seen} visible GPU{'s' * (seen != 1)}",
            (Evidence(start.launcher, f"{processes} processes on this node"), here, cards),
            "Ranks without a GPU of their own fail with \"invalid device ordinal\", or share one: NCCL then reports "
            "\"Duplicate GPU detected\".",
            f"Start {seen} processes a node (--nproc_per_node, NPROC_PER_NODE, --num_processes), or make more visible.",
        )  # fmt: skip
    elif start.launcher == "python" and seen > 1:
        deepspeed = found is not None and found.deepspeed is not None
        yield Finding(
            "launch.no-launcher", "error" if deepspeed or found is None else "warning",
            f"one process would see {seen} GPUs: no distributed launcher",
            (Evidence("start", " ".join(start.words)[:200]), here),
            "Trainer then tries DataParallel, which DeepSpeed refuses (\"DeepSpeed is not compatible with MP\") and "
            "LLaMA-Factory too.",
            "Use dpofit launch, FORCE_TORCHRUN=1 llamafactory-cli train, torchrun, or NPROC_PER_NODE for ms-swift.",
        )  # fmt: skip
    elif processes is not None and asked is not None and processes < seen:
        yield Finding(
            "launch.fewer-ranks-than-gpus", "warning", f"{processes} ranks, but {_CVD} shows {seen} GPUs",
            (Evidence(start.launcher, f"{processes} processes on this node"), here),
            "The rest of the GPUs would idle; often one of the two numbers is out of date.",
            f"Make NPROC_PER_NODE and {_CVD} agree.",
        )  # fmt: skip


def _deepspeed_launcher(machine: Machine, start: Start, visible: int) -> Iterator[Finding]:
    """deepspeed/launcher/runner.py (0.18.4): device_count() of the visible set makes the slots 0..n-1; with any filter
    option CUDA_VISIBLE_DEVICES is dropped and --include counts physical devices."""
    asked = start.environment.get(_CVD)
    total = len(machine.inventory.cards)
    if asked is not None and (start.filtered or start.hosts):
        options = " ".join(word for word in start.words if word.startswith("--"))[:120]
        yield Finding(
            "launch.deepspeed-ignores-visible-devices", "error",
            f"the deepspeed launcher and {_CVD} both choose GPUs",
            (Evidence(_CVD, asked), Evidence("deepspeed", options or "hostfile")),
            "With --include, --exclude, --num_gpus, --num_nodes or a hostfile the launcher ignores the variable, or "
            "(older releases) counts slots inside it: \"No slot '2' specified on host 'localhost'\".",
            f"unset {_CVD} and write --include localhost:{asked}, or drop the options.",
        )  # fmt: skip
    elif asked is not None:
        beyond = any(entry.strip().isdigit() and int(entry) >= visible for entry in asked.split(","))
        yield Finding(
            "launch.deepspeed-ignores-visible-devices", "warning" if beyond else "info",
            f"the deepspeed launcher turns {_CVD}={asked} into --include",
            (Evidence(_CVD, asked), Evidence("deepspeed", machine.versions.get("deepspeed", "not installed"))),
            "Only on one node and without filter options. Some releases count slots inside the variable (\"No slot '2' "
            "specified on host 'localhost'\"), those before 2021 overwrite it.",
            f"unset {_CVD} and write --include localhost:{asked}.",
        )  # fmt: skip
    limit = total if start.filtered else visible
    outside = [slot for slot in start.slots or () if slot >= limit]
    if outside:
        yield Finding(
            "launch.visible-devices-out-of-range", "error", f"--include names slots that are not here: {outside}",
            (Evidence("deepspeed --include", str(list(start.slots or ()))), Evidence("NVML", f"{total} GPUs")),
            "The launcher stops with \"No slot … specified on host\".", f"Name slots 0 to {limit - 1}.",
        )  # fmt: skip
    if len(set(start.slots or ())) != len(start.slots or ()):
        yield Finding(
            "launch.duplicate-gpu", "error", "--include names a slot twice",
            (Evidence("deepspeed --include", str(list(start.slots or ()))),),
            "Two ranks would share a GPU.", "Name each slot once.",
        )  # fmt: skip
    if len(set(start.hosts.values())) > 1:
        listed = ", ".join(f"{host} slots={slots}" for host, slots in start.hosts.items())
        yield Finding(
            "launch.unequal-nodes", "error", "the hostfile's nodes have different numbers of slots",
            (Evidence("hostfile", listed),),
            "Local ranks and batch arithmetic assume equal nodes; LLaMA-Factory does not start with such a world size.",
            "Give every host the same number of slots.",
        )  # fmt: skip


def _busy(machine: Machine, start: Start) -> Iterator[Finding]:
    for card in visible_cards(machine.inventory, start.environment).cards:
        if card.used_bytes < BUSY_BYTES:
            continue
        users = (
            ", ".join(f"pid {pid} {format_gib(n_bytes)}" for pid, n_bytes in card.users) or "processes not shown here"
        )
        yield Finding(
            "launch.gpu-busy", "warning",
            f"GPU {card.index} is in use: {format_gib(card.used_bytes)} of {format_gib(card.total_bytes)}",
            (Evidence(f"NVML, GPU {card.index}", users),),
            "Often ranks of an earlier run that outlived their launcher; their memory is missing to this one.",
            "Look at the pids (ps -fp PID), end what is yours, or choose other GPUs.",
        )  # fmt: skip


def _driver(machine: Machine) -> Iterator[Finding]:
    driver, wanted = machine.inventory.cuda_driver, machine.torch_cuda
    assert driver is not None and wanted is not None
    if driver[0] < int(wanted.partition(".")[0]):
        yield Finding(
            "launch.driver-too-old", "error",
            f"the driver knows CUDA {driver[0]}.{driver[1]}, torch was built for {wanted}",
            (Evidence("NVML", f"driver {machine.inventory.driver}"), Evidence("torch", f"CUDA {wanted}")),
            "torch.cuda.is_available() is then false, or the first kernel fails.",
            "Update the driver, or install a torch built for the older CUDA.",
        )  # fmt: skip


def _no_cards(machine: Machine) -> Finding:
    evidence = [Evidence("NVML", machine.inventory.error or "0 GPUs")]
    cause, fix = (
        "No NVIDIA driver answers on this machine.",
        "Run on a GPU node; `dpofit launch RECIPE --smoke` runs here.",
    )
    if machine.in_container:
        evidence.append(Evidence("/dev/nvidia*", f"{machine.nvidia_devices} devices in this container"))
        cause = "A container sees no GPU unless it is started with them."
        fix = "docker run --gpus all (or --gpus '\"device=0,1\"'); in Kubernetes a limit of nvidia.com/gpu."
    return Finding("launch.no-gpu", "error", "no GPU can be seen", tuple(evidence), cause, fix)


def _names(machine: Machine) -> str:
    names = [card.name for card in machine.inventory.cards]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
