"""Runs a function on real ranks: processes forked from one server that has imported the training stack already."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PRELOAD = ["tests.guard.stack"]


@dataclass(frozen=True)
class RankResult:
    """What one rank returned, or how it ended: negative exit codes are signals."""

    value: Any
    error: str | None
    exitcode: int


def start_server() -> Any:
    """The fork server; importing torch, transformers and DeepSpeed takes seconds, forking from it milliseconds."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
    stragglers_s: float | None = None,
    quiet: bool = True,
) -> list[RankResult]:
    """Run `function(*arguments)` as `world_size` torch.distributed ranks and wait.

    A rank that gives no answer in `timeout_s` is killed; after rank 0's answer, others have `stragglers_s`.
    """
    context = start_server()
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(env or {}),
        }  # fmt: skip
        process = context.Process(target=_enter, args=(function, arguments, variables, sender, quiet))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results = []
    for process, pipe in zip(processes, pipes, strict=True):
        value, error = None, None
        try:
            patience_s = timeout_s if stragglers_s is None or not results else stragglers_s
            if pipe.poll(patience_s):
                value, error = pipe.recv()
            else:
                error = f"no answer in {patience_s} s"
        except EOFError:
            error = "ended without an answer"
        process.join(10 if error is None or value is not None else 0.1)
        if process.exitcode is None:
            process.kill()
            process.join()
        results.append(RankResult(value, error, int(process.exitcode)))
    return results


def values(results: Sequence[RankResult]) -> list[Any]:
    """What the ranks returned; fails the test with a rank's traceback if one failed."""
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank} (exit {result.exitcode}): {result.error}"
    return [result.value for result in results]


def _enter(
    function: Callable[..., Any], arguments: Sequence[Any], env: Mapping[str, str], pipe: Any, quiet: bool
) -> None:
    os.environ.update(env)
    if quiet:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        pipe.send((function(*arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    finally:
        pipe.close()
        sys.stdout.flush()
        os._exit(0)  # no native teardown: it races after the last collective
