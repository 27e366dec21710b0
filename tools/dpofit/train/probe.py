"""Gathers what every participant of a job says of itself, over gloo or the job's store, before NCCL is touched."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any


def gather_gloo(address: str, number: int, count: int, payload: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """`{"gathered": [...]}`, or `{"missing": [...]}`, `{"twice": {...}}` when not everybody came, or one came twice.

    `address` is HOST:PORT; participant 0 listens there.
    """
    import torch.distributed as dist

    host, _, port = address.rpartition(":")
    store = dist.TCPStore(
        host.strip("[]"), int(port), is_master=number == 0, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
    if store.add(f"claims/{number}", 1) > 1:
        first = store.get(f"here/{number}").decode()
        store.set(f"twice/{number}", json.dumps([first, payload["machine"]["hostname"]]))
        return {"twice": {"number": number, "hosts": [first, payload["machine"]["hostname"]]}}
    store.set(f"here/{number}", payload["machine"]["hostname"])
    deadline = time.monotonic() + timeout_s
    while missing := [other for other in range(count) if not store.check([f"here/{other}"])]:
        twice = [other for other in range(count) if store.check([f"twice/{other}"])]
        if twice:
            if number == 0:
                time.sleep(1.0)  # it holds the store: the others shall read this too
            return {"twice": {"number": twice[0], "hosts": json.loads(store.get(f"twice/{twice[0]}"))}}
        if time.monotonic() > deadline:
            return {"missing": missing}
        time.sleep(0.1)
    dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=timedelta(seconds=timeout_s))
    gathered: list[Any] = [None] * count
    dist.all_gather_object(gathered, payload)
    dist.barrier()  # participant 0 holds the store: nobody may need it after it has gone
    dist.destroy_process_group()
    return {"gathered": gathered}


def gather_job(payload: dict[str, Any], timeout_s: float = 300.0) -> list[dict[str, Any]] | None:
    """The payloads of all ranks of this torchrun job, through the agent's store; None where there is none to ask."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or int(env.get("WORLD_SIZE", "1")) < 2:
        return None
    import torch.distributed as dist

    rank, count = int(env["RANK"]), int(env["WORLD_SIZE"])
    store: Any = dist.TCPStore(
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=timeout_s)
    )
    store = dist.PrefixStore(f"dpofit/probe/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(str(rank), json.dumps(payload))
    return [json.loads(store.get(str(other))) for other in range(count)]


def main() -> None:
    """`python -m dpofit.train.probe HOST:PORT NUMBER COUNT TIMEOUT`: payload on stdin, answer on stdout, as JSON."""
    address, number, count, timeout_s = sys.argv[1:5]
    try:
        answer = gather_gloo(address, int(number), int(count), json.load(sys.stdin), float(timeout_s))
    except Exception as error:  # torch raises many types for a peer that can't be reached
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
