"""Meets the other nodes at HOST:PORT, in a process of its own that may import torch, and compares notes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.findings import Evidence, Finding
from dpofit.launch.machine import Machine
from dpofit.launch.preflight.compare import Participant, participant_from_json, participant_json, places
from dpofit.launch.topology import Topology
from dpofit.recipe.load import ReadRecipe


def participant(
    machine: Machine, environment: Mapping[str, str], topology: Topology, found: ReadRecipe | None
) -> tuple[Participant, int]:
    """Who we are at the rendezvous, and how many will come: one process a node that speaks for all its ranks, or, with
    RANK and WORLD_SIZE and no number of nodes (a loop over GPUs), one process a rank."""
    alone = "RANK" in environment and "WORLD_SIZE" in environment and topology.nodes == 1
    if alone:
        number, count = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        ranks = [(number, int(environment.get("LOCAL_RANK", "0") or 0))]
    else:
        number, count = topology.node_rank, topology.nodes
        ranks = [(number * topology.processes + local, local) for local in range(topology.processes)]
    return Participant(number, machine, places(machine, environment, ranks), _paths(found)), count


def meet(
    address: str, me: Participant, count: int, timeout_s: float
) -> tuple[tuple[Participant, ...], tuple[Finding, ...]]:
    """`(everybody, findings about the meeting itself)`; nobody when it did not come about. BadInput without torch."""
    if re.fullmatch(r".+:[0-9]{1,5}", address) is None or int(address.rpartition(":")[2]) > 65535:
        raise BadInput(
            Problem("command line", "--rendezvous", f"{address!r} is not HOST:PORT", "Write 10.0.0.1:29400.")
        )
    if importlib.util.find_spec("torch") is None:
        raise BadInput(Problem("command line", "--rendezvous", "needs torch, which is not installed here", ""))
    command = [sys.executable, "-m", "dpofit.train.probe", address, str(me.number), str(count), str(timeout_s)]
    try:
        done = subprocess.run(
            command, input=json.dumps(participant_json(me)), capture_output=True, text=True, timeout=2 * timeout_s + 60
        )
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        answer = {"error": f"no answer within {2 * timeout_s + 60:g} s"}
    except (ValueError, IndexError):
        answer = {"error": (done.stderr.strip().splitlines() or ["ended without an answer"])[-1][:300]}
    if "gathered" in answer:
        everybody = [participant_from_json(document) for document in answer["gathered"]]
        return _numbered(everybody), ()
    return (), (_not_met(address, me, count, answer),)


def _numbered(everybody: list[Participant]) -> tuple[Participant, ...]:
    """Global ranks counted through: nodes may have different numbers of processes."""
    result, following = [], 0
    for one in sorted(everybody, key=lambda participant: participant.number):
        if len(one.places) == 1 and len(everybody) > 1 and one.places[0].rank == one.number:
            result.append(one)
            continue
        moved = tuple(type(place)(following + i, place.local_rank, place.card) for i, place in enumerate(one.places))
        following += len(one.places)
        result.append(Participant(one.number, one.machine, moved, one.paths))
    return tuple(result)


def _not_met(address: str, me: Participant, count: int, answer: Mapping[str, Any]) -> Finding:
    here = Evidence(me.host, f"participant {me.number} of {count}")
    if "missing" in answer:
        absent = ", ".join(map(str, answer["missing"]))
        return Finding(
            "launch.node-missing", "error", f"participants {absent} of {count} did not come to {address}", (here,),
            "They were not started, have another number or address, or a firewall keeps them away.",
            "Run the same command on every node, each with its own NODE_RANK, all with one MASTER_ADDR.",
        )  # fmt: skip
    if "twice" in answer:
        number, hosts = answer["twice"]["number"], answer["twice"]["hosts"]
        return Finding(
            "launch.duplicate-rank", "error", f"two processes both take themselves for number {number}",
            (Evidence("came", " and ".join(hosts)), here),
            "Often RANK was set where NODE_RANK is read, or neither.", "Give each node its own NODE_RANK, from 0.",
        )  # fmt: skip
    return Finding(
        "launch.rendezvous-failed", "error", f"no connection to {address}",
        (here, Evidence("gloo", str(answer["error"]))),
        "The address does not lead to participant 0, the port is taken or closed, or gloo chose an interface that does "
        "not reach the others.",
        "Check the address on every node; GLOO_SOCKET_IFNAME names the interface.",
    )  # fmt: skip


def _paths(found: ReadRecipe | None) -> dict[str, bool]:
    """Local paths that every node must see."""
    if found is None or found.recipe is None:
        return {}
    settings = found.settings
    asked = [str(settings["dataset_dir"]), settings["tokenized_path"], settings["ref_model"], found.recipe.model]
    asked += [settings["adapter_name_or_path"]]
    local = [
        str(path) for path in asked if path and (str(path).startswith(("/", ".", "~")) or str(path).count("/") != 1)
    ]
    return {path: Path(path).expanduser().exists() for path in local if not path.startswith(("ONLINE", "REMOTE:"))}


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdigit():
        raise BadInput(Problem("environment", name, f"is {text!r}", "Write a number."))
    return int(text)
