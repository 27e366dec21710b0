"""Findings that only all ranks together can tell: shared GPUs, hosts NCCL can't tell apart, unequal nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dpofit.findings import Evidence, Finding
from dpofit.launch.inventory import Card, visible_cards
from dpofit.launch.machine import Machine, machine_from_json, machine_json


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank will run. `card` None: no GPU for it."""

    rank: int
    local_rank: int
    card: Card | None


@dataclass(frozen=True, slots=True)
class Participant:
    """One process that reported: a node for all its ranks, or one rank for itself. `paths`: seen from here or not."""

    number: int
    machine: Machine
    places: tuple[Place, ...]
    paths: Mapping[str, bool] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.machine.hostname


def places(machine: Machine, environment: Mapping[str, str], ranks: Sequence[tuple[int, int]]) -> tuple[Place, ...]:
    """`(rank, local rank)` pairs → places; the local rank counts the cards that this environment makes visible."""
    cards = visible_cards(machine.inventory, environment).cards
    return tuple(Place(rank, local, cards[local] if local < len(cards) else None) for rank, local in ranks)


def participant_json(participant: Participant) -> dict[str, Any]:
    """Plain values to send."""
    return {**asdict(participant), "machine": machine_json(participant.machine)}


def participant_from_json(document: Mapping[str, Any]) -> Participant:
    """The inverse of `participant_json`."""

    def place(entry: Mapping[str, Any]) -> Place:
        card = entry["card"]
        users = tuple(tuple(user) for user in card["users"]) if card else ()
        return Place(entry["rank"], entry["local_rank"], Card(**{**card, "users": users}) if card else None)

    where = tuple(place(entry) for entry in document["places"])
    return Participant(document["number"], machine_from_json(document["machine"]), where, document["paths"])


def compare(participants: Sequence[Participant]) -> tuple[Finding, ...]:
    """Everything that is wrong between them, errors first."""
    findings = [
        *_shared_cards(participants),
        *_host_ids(participants),
        *_hostnames(participants),
        *_unequal(participants),
        *_versions(participants),
        *_settings(participants),
        *_paths(participants),
    ]
    return tuple(sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.severity)))


def rank_table(participants: Sequence[Participant]) -> list[tuple[str, str, str, str, str]]:
    """`rank, host, local rank, GPU, PCI bus` of every rank, in order."""
    rows = []
    for participant in participants:
        for place in participant.places:
            card = place.card
            gpu = "none" if card is None else f"{card.index} {card.name} {card.uuid[:12]}"
            bus = "–" if card is None else card.bus_id
            rows.append((place.rank, participant.host, place.local_rank, gpu, bus))
    return [(str(rank), host, str(local), gpu, bus) for rank, host, local, gpu, bus in sorted(rows)]


def _shared_cards(participants: Sequence[Participant]) -> Iterator[Finding]:
    users = defaultdict(list)
    for participant in participants:
        for place in participant.places:
            if place.card is not None:
                users[place.card.uuid].append((participant, place))
    for sharing in users.values():
        if len(sharing) < 2:
            continue
        card = sharing[0][1].card
        assert card is not None
        ranks = " and ".join(str(place.rank) for _, place in sharing)
        hosts = list(dict.fromkeys(participant.host for participant, _ in sharing))
        evidence = tuple(
            Evidence(
                f"rank {place.rank}",
                f"{participant.host}, local rank {place.local_rank}, GPU {card.index} {card.bus_id}, "
                f"CUDA_VISIBLE_DEVICES={participant.machine.environment.get('CUDA_VISIBLE_DEVICES', 'unset')}",
            )
            for participant, place in sharing
        )
        if len(hosts) > 1:
            cause = f"{' and '.join(hosts)} are containers on one machine that were given the same GPU."
            fix = "Give each container its own devices (docker --gpus '\"device=…\"', nvidia.com/gpu limits)."
        else:
            cause = "A launcher was started more than once on the node, or each process sees the same first GPU."
            fix = "One launcher a node; in one-process-per-GPU loops set CUDA_VISIBLE_DEVICES=$i for each."
        yield Finding(
            "launch.duplicate-gpu", "error", f"ranks {ranks} share one GPU ({card.uuid})", evidence,
            f"{cause} NCCL: \"Duplicate GPU detected\".", fix,
        )  # fmt: skip


def _host_ids(participants: Sequence[Participant]) -> Iterator[Finding]:
    """NCCL takes ranks with one host id for neighbours, and tries shared memory and P2P between them."""
    for identity, group in _grouped(participants, lambda participant: participant.machine.nccl_host_id).items():
        machines = _distinct_machines(group)
        if len(machines) < 2:
            continue
        evidence = tuple(
            Evidence(
                participant.host,
                f"ranks {_ranks(participant)}, "
                f"NCCL_HOSTID {participant.machine.environment.get('NCCL_HOSTID', 'unset')}, "
                f"boot id {participant.machine.boot_id[:8]}, MAC {', '.join(sorted(_macs(participant)))}",
            )
            for participant in machines
        )
        yield Finding(
            "launch.same-host-id", "error", f"{len(machines)} machines look like one host to NCCL ({identity[:60]})",
            evidence,
            "NCCL tells hosts apart by NCCL_HOSTID, else hostname and boot id; cloned images and containers can share "
            "both. It then reports \"Duplicate GPU detected\" for equal PCI addresses, or tries P2P between machines.",
            "Set a different NCCL_HOSTID on each node, for example NCCL_HOSTID=node$NODE_RANK.",
        )  # fmt: skip


def _hostnames(participants: Sequence[Participant]) -> Iterator[Finding]:
    for prefix, group in _grouped(participants, lambda participant: participant.host.partition(".")[0]).items():
        machines = _distinct_machines(group)
        if len(machines) < 2:
            continue
        names = list(dict.fromkeys(participant.host for participant in machines))
        equal = len(names) == 1
        evidence = tuple(Evidence(f"ranks {_ranks(participant)}", participant.host) for participant in machines)
        cause = (
            "Logs and state folders are named after the host, and NCCL needs the boot id to tell such hosts apart."
            if equal
            else "NCCL releases up to early 2019 cut hostnames at the first dot and took such hosts for one (nccl#187)."
        )
        yield Finding(
            "launch.same-hostname", "warning",
            f"{len(machines)} machines are called {prefix}" + ("" if equal else " up to the first dot"),
            evidence, cause, "Give each machine a hostname of its own, or set NCCL_HOSTID on each.",
        )  # fmt: skip


def _unequal(participants: Sequence[Participant]) -> Iterator[Finding]:
    hosts = _grouped(participants, lambda participant: (participant.host, participant.machine.boot_id))
    counts = {host: sum(len(participant.places) for participant in group) for (host, _), group in hosts.items()}
    if len(set(counts.values())) > 1:
        yield Finding(
            "launch.unequal-nodes", "error", "nodes have different numbers of ranks",
            tuple(Evidence(host, f"{count} ranks") for host, count in counts.items()),
            "Local ranks and batch arithmetic assume equal nodes; LLaMA-Factory does not start with such a world size.",
            "Use the same NPROC_PER_NODE on every node.",
        )  # fmt: skip
    without = [(participant, place) for participant in participants for place in participant.places if not place.card]
    if without and any(participant.machine.inventory.cards for participant in participants):
        yield Finding(
            "launch.more-ranks-than-gpus", "error", f"{len(without)} ranks have no GPU",
            tuple(Evidence(f"rank {place.rank}", f"{participant.host}, local rank {place.local_rank}, "
                           f"{len(participant.machine.inventory.cards)} GPUs there") for participant, place in without),
            "They would fail with \"invalid device ordinal\", or share a GPU.",
            "Start no more processes a node than it has visible GPUs.",
        )  # fmt: skip
    kinds = _grouped(
        participants, lambda participant: tuple(sorted({c.name for c in participant.machine.inventory.cards}))
    )
    if len(kinds) > 1:
        yield Finding(
            "launch.mixed-gpus", "warning", "nodes have different kinds of GPU",
            tuple(Evidence(group[0].host, ", ".join(names) or "none") for names, group in kinds.items()),
            "The smallest decides what fits, the slowest how long a step takes.", "",
        )  # fmt: skip


def _versions(participants: Sequence[Participant]) -> Iterator[Finding]:
    packages = {package for participant in participants for package in participant.machine.versions}
    for package in sorted(packages):
        held = _grouped(participants, _version_of(package))
        if len(held) < 2:
            continue
        severity = "error" if "nccl" in package or package == "torch" else "warning"
        yield Finding(
            "launch.versions-differ", severity, f"{package} differs between nodes",  # type: ignore[arg-type]
            tuple(Evidence(group[0].host, f"{package} {version}") for version, group in held.items()),
            "Ranks of different NCCL versions don't connect; other differences change numbers or hang collectives.",
            "Install the same requirements.txt on every node.",
        )  # fmt: skip


def _settings(participants: Sequence[Participant]) -> Iterator[Finding]:
    """NCCL switches that must agree; interface names may differ."""
    must_agree = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_PROTO", "NCCL_ALGO", "NCCL_NET")
    for name in must_agree:
        held = _grouped(participants, _setting_of(name))
        if len(held) > 1:
            yield Finding(
                "launch.settings-differ", "error", f"{name} differs between nodes",
                tuple(Evidence(group[0].host, f"{name}={value}") for value, group in held.items()),
                "Both ends of a connection must use the same transport: the first collective hangs.",
                "Export the same NCCL variables on every node.",
            )  # fmt: skip


def _version_of(package: str) -> Callable[[Participant], str]:
    return lambda participant: participant.machine.versions.get(package, "not installed")


def _setting_of(name: str) -> Callable[[Participant], str]:
    return lambda participant: participant.machine.environment.get(name, "unset")


def _paths(participants: Sequence[Participant]) -> Iterator[Finding]:
    for path in dict.fromkeys(path for participant in participants for path in participant.paths):
        lacking = [participant for participant in participants if participant.paths.get(path) is False]
        if lacking and len(lacking) < len(participants):
            yield Finding(
                "launch.path-not-everywhere", "error", f"not every node sees {path}",
                tuple(Evidence(participant.host, "not there") for participant in lacking),
                "Each node reads model and data itself.", "Copy it there, or use a path on shared storage.",
            )  # fmt: skip


def _distinct_machines(group: Sequence[Participant]) -> list[Participant]:
    """One participant of each machine in the group, told apart by boot id, MAC addresses or GPUs."""
    machines: list[Participant] = []
    for participant in group:
        if not any(_same_machine(participant, known) for known in machines):
            machines.append(participant)
    return machines


def _same_machine(one: Participant, other: Participant) -> bool:
    """Processes of one machine share its boot id, and either GPUs or network cards. Without both to look at on either
    side nothing speaks against it."""
    if one.machine.boot_id != other.machine.boot_id:
        return False
    cards = {card.uuid for card in one.machine.inventory.cards}, {card.uuid for card in other.machine.inventory.cards}
    macs = _macs(one), _macs(other)
    if all(cards):
        return bool(cards[0] & cards[1])
    return bool(macs[0] & macs[1]) if all(macs) else True


def _macs(participant: Participant) -> set[str]:
    return {i.mac for i in participant.machine.interfaces if i.mac and i.mac != "00:00:00:00:00:00"}


def _ranks(participant: Participant) -> str:
    return ", ".join(str(place.rank) for place in participant.places)


def _grouped(participants: Sequence[Participant], key: Callable[[Participant], Any]) -> dict[Any, list[Participant]]:
    groups: dict[Any, list[Participant]] = defaultdict(list)
    for participant in participants:
        groups[key(participant)].append(participant)
    return groups
