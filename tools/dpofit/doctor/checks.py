"""The decisions a pattern can't take: numbers in a message, readings before it, several logs together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dpofit.doctor.facts import Event, LogFacts
from dpofit.doctor.oom import Oom, read_oom
from dpofit.doctor.tensors import Shape, which_tensor

Details = dict[str, str]  # fills {name} in a diagnosis's title and cause
SHOWN_GUESSES = 2
FULL_PERCENT = 90.0  # host memory in use at DeepSpeed's last reading: from here a kill is explained by it


def when(event: Event) -> Details:
    """Where the run was: always available to titles and causes."""
    place = event.place
    at = {
        "data": "while preparing the data",
        "load": "between loading and the first step",
        "init": "between loading and the first step",
        "eval": "in evaluation",
        "save": "at a save",
        "done": "after training",
    }.get(place.phase or "", "")
    step = f"step {place.step:,} of {place.steps:,}" if place.step is not None and place.steps else ""
    if place.phase in ("train", None) and step:
        at = f"at {step}"
    elif at and step and place.phase in ("eval", "save"):
        at = f"{at} ({step})"
    return {"when": f" {at}" if at else "", "rank": "?" if place.rank is None else str(place.rank)}


def gpu_oom(event: Event, facts: LogFacts) -> Details | None:
    return _oom_details(read_oom(event.groups["message"]))


def gpu_fragmentation(event: Event, facts: LogFacts) -> Details | None:
    oom = read_oom(event.groups["message"])
    return _oom_details(oom) if oom.fragmented else None


def gpu_other_process(event: Event, facts: LogFacts) -> Details | None:
    oom = read_oom(event.groups["message"])
    if not oom.strangers_bytes:
        return None
    return {**_oom_details(oom), "others": gib(sum(oom.strangers_bytes))}


def _oom_details(oom: Oom) -> Details:
    known = (
        (oom.total_bytes, "card of {}"),
        (oom.allocated_bytes, "{} in tensors"),
        (oom.unallocated_bytes, "{} reserved but unallocated"),
        (oom.free_bytes, "{} free"),
    )
    parts = [text.format(gib(size)) for size, text in known if size is not None]
    wanted = "an unreadable size" if oom.wanted_bytes is None else gib(oom.wanted_bytes)
    contexts = [size for size in oom.other_processes_bytes if size not in oom.strangers_bytes]
    if contexts:
        parts.append(f"{len(contexts)} other process(es) with a context here")
    return {
        "wanted": wanted,
        "numbers": f" ({', '.join(parts)})" if parts else "",
        "device": "" if oom.device is None else f" {oom.device}",
    }


def gib(size: int) -> str:
    """Bytes as a human reads them, in binary units."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def host_memory(event: Event, facts: LogFacts) -> Details | None:
    """True when the line itself names memory, or DeepSpeed's last reading before a -9 was nearly full."""
    if b"-9" not in event.place.text and b"SIGKILL" not in event.place.text:
        return {"sure": "the log names memory"}
    before = [reading for reading in facts.readings if reading.place.offset < event.place.offset]
    if before and before[-1].percent >= FULL_PERCENT:
        last = before[-1]
        return {"sure": f"host memory stood at {last.percent:g}% ({last.used_gib:g} GB) before the kill"}
    return None


def killed_at_save(event: Event, facts: LogFacts) -> Details | None:
    saves = sum(1 for save in facts.saves if b"model checkpoint" in save.text and save.offset < event.place.offset)
    return {"saves": f"save number {saves}" if saves else "a save", **_sure(event)}


def killed_at_load(event: Event, facts: LogFacts) -> Details | None:
    return _sure(event)


def _sure(event: Event) -> Details:
    named = re.search(rb"(?i)out of memory|oom|memory limit", event.place.text)
    return {"sure": "The kernel or the scheduler says so" if named else "No kernel message is in this log; inferred"}


def killed_unexplained(event: Event, facts: LogFacts) -> Details | None:
    before = [reading for reading in facts.readings if reading.place.offset < event.place.offset]
    if not before:
        return {"reading": ""}
    last = before[-1]
    return {"reading": f" DeepSpeed's last reading: {last.used_gib:g} GB of host memory in use ({last.percent:g}%)."}


def p2p_across_hosts(event: Event, facts: LogFacts) -> Details | None:
    """rank[device] pairs: on one host of a usual launch rank - device is the same for all."""
    ranks = [int(event.groups[key]) for key in ("rank_a", "device_a", "rank_b", "device_b")]
    return {} if ranks[0] - ranks[1] != ranks[2] - ranks[3] else None


def duplicate_ranks(event: Event, facts: LogFacts) -> Details | None:
    a, b = event.groups.get("a", "?"), event.groups.get("b", "?")
    return {"a": a, "b": b, "apart": str(abs(int(a) - int(b))) if a.isdigit() and b.isdigit() else "?"}


def barrier_timeout(event: Event, facts: LogFacts) -> Details | None:
    """The first collectives of a run, one number long: ranks waiting for the main process."""
    return {} if int(event.groups["seq"]) <= 10 and event.groups["numel"] == "1" else None


def slots_not_counted(event: Event, facts: LogFacts) -> Details | None:
    """DeepSpeed prints the slots asked for and those it counts; a finding only when one of the first is not counted."""
    if "asked" not in event.groups:
        return {}
    asked, counted = (set(event.groups[key].replace(",", " ").split()) for key in ("asked", "counted"))
    return None if asked <= counted else {}


EventCheck = Callable[[Event, LogFacts], Details | None]
EVENT_CHECKS: dict[str, EventCheck] = {
    check.__name__: check
    for check in (
        gpu_oom,
        gpu_fragmentation,
        gpu_other_process,
        host_memory,
        killed_at_save,
        killed_at_load,
        killed_unexplained,
        p2p_across_hosts,
        duplicate_ranks,
        barrier_timeout,
        slots_not_counted,
    )
}


def node_rank_twice(logs: Sequence[LogFacts]) -> tuple[int, Event] | None:
    """Two nodes' logs say the same node rank: each waits for the others as if it were the first."""
    seen: dict[int, str] = {}
    for number, log in enumerate(logs):
        for place, nodes, node_rank in log.node_ranks[-1:]:
            if nodes > 1 and seen.get(node_rank, log.name) != log.name:
                groups = {"node_rank": str(node_rank), "nodes": str(nodes), "other": seen[node_rank]}
                return number, Event("launch.node-rank-twice", place, groups)
            seen[node_rank] = log.name
    return None


LOGS_CHECKS: dict[str, Callable[[Sequence[LogFacts]], tuple[int, Event] | None]] = {"node_rank_twice": node_rank_twice}


def decoded(
    message: str, shape: Shape, rows: int, longest: int | None, world_size: int | None, eager: bool
) -> str | None:
    """What tensor of this model an out-of-memory message is about, as a sentence; None when its size tells nothing."""
    oom = read_oom(message)
    if oom.wanted_bytes is None or oom.wanted_within_bytes is None:
        return None
    guesses = which_tensor(oom.wanted_bytes, oom.wanted_within_bytes, shape, rows, longest, world_size, eager)
    if not guesses:
        return None
    alike = " or ".join(f"{guess.what} of {guess.arithmetic}" for guess in guesses[:SHOWN_GUESSES])
    return f"In this model {gib(oom.wanted_bytes)} = {alike}."
