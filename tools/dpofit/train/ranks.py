"""The first thing ranks of a torchrun job do: tell each other who and where they are, before NCCL is touched."""

from __future__ import annotations

import os

from dpofit.errors import BadInput, Problem
from dpofit.launch.machine import read_machine
from dpofit.launch.preflight.compare import (
    Participant,
    compare,
    participant_from_json,
    participant_json,
    places,
    rank_table,
)
from dpofit.train.probe import gather_job


def check_ranks() -> None:
    """Print `rank → host → local rank → GPU` on rank 0; BadInput on every rank when two share a GPU, or hosts can't be
    told apart. Does nothing without torchrun's store (one process, accelerate's own launchers)."""
    if "RANK" not in os.environ:
        return
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    machine = read_machine()
    me = Participant(rank, machine, places(machine, os.environ, [(rank, local_rank)]))
    gathered = gather_job(participant_json(me))
    if gathered is None:
        return
    everybody = [participant_from_json(document) for document in gathered]
    if rank == 0:
        for row in rank_table(everybody):
            print("dpofit: rank {:>3}  {}  local rank {}  GPU {}  {}".format(*row), flush=True)
    errors = [finding for finding in compare(everybody) if finding.severity == "error"]
    if errors:
        raise BadInput(
            [Problem(finding.id, None, finding.title, f"{finding.cause} {finding.fix}") for finding in errors]
        )
