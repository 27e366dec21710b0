"""Writes what each rank really uses, step by step, and warns when it passes what was predicted."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from dpofit.train.cgroup import cgroup_memory
from dpofit.train.hooks import Hook
from dpofit.units import GIB

SCHEMA = "dpofit.memory/1"


@dataclass(frozen=True, slots=True)
class Reading:
    """One rank after one optimizer step. GPU fields are None without CUDA, cgroup fields without a memory cgroup.

    Allocated and reserved are torch's peaks since the previous reading (with RECORD_VRAM on, since the start); NVML
    counts the whole card, other processes included; RSS is this process, cgroup the whole group (on a node: all ranks
    and the page cache).
    """

    schema: str
    time: float
    step: int
    rank: int
    local_rank: int
    loss: float | None
    gpu_allocated_peak_bytes: int | None
    gpu_reserved_peak_bytes: int | None
    gpu_nvml_used_bytes: int | None
    host_rss_bytes: int
    cgroup_used_bytes: int | None
    cgroup_limit_bytes: int | None


class MemoryLog(TrainerCallback):
    """Appends to `output_dir/dpofit/memory.<node_rank>.jsonl`; rank 0 also prints a line for each logged step."""

    def __init__(self) -> None:
        self._rank = int(os.environ.get("RANK", "0"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._node_rank = int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0")))
        self._predicted_gpu_bytes = _int(os.environ.get("DPOFIT_PREDICTED_GPU_BYTES"))
        self._predicted_host_bytes = _int(os.environ.get("DPOFIT_PREDICTED_HOST_BYTES"))
        self._pending: Reading | None = None
        self._warned: set[str] = set()
        self._broken = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read now; the loss, if this step is logged, comes a moment later."""
        self._flush(args)
        cgroup = cgroup_memory()
        allocated, reserved, nvml = _gpu()
        self._pending = Reading(
            SCHEMA, time.time(), state.global_step, self._rank, self._local_rank, None, allocated, reserved, nvml,
            psutil.Process().memory_info().rss, cgroup.used_bytes, cgroup.limit_bytes,
        )  # fmt: skip
        self._compare(self._pending)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """The logged loss belongs to the reading just made."""
        if self._pending is None or not logs or "loss" not in logs:
            return
        reading = self._pending
        loss = float(logs["loss"])
        self._pending = Reading(**{**asdict(reading), "loss": loss})
        if state.is_world_process_zero:
            print(line(self._pending, state.max_steps), flush=True)
        self._flush(args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing may be lost if this step dies."""
        self._flush(args)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last reading."""
        self._flush(args)

    def latest(self) -> Reading | None:
        """The newest reading not yet written."""
        return self._pending

    def _flush(self, args: Any) -> None:
        reading, self._pending = self._pending, None
        if reading is None or self._broken:
            return
        path = Path(args.output_dir) / "dpofit" / f"memory.{self._node_rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One write per line in append mode: ranks of a node share the file and lines stay whole.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, (json.dumps(asdict(reading)) + "\n").encode())
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk must not end training; say so once
            self._broken = True
            print(f"dpofit: rank {self._rank} stops writing {path}: {error}", flush=True)

    def _compare(self, reading: Reading) -> None:
        pairs = (
            ("GPU", reading.gpu_reserved_peak_bytes, self._predicted_gpu_bytes),
            ("host", reading.cgroup_used_bytes, self._predicted_host_bytes),
        )
        for what, measured_bytes, predicted_bytes in pairs:
            if what == "host" and self._local_rank != 0:
                continue  # the cgroup is the node's: one warning is enough
            if measured_bytes is None or predicted_bytes is None or what in self._warned:
                continue
            if measured_bytes > predicted_bytes:
                self._warned.add(what)
                print(
                    f"dpofit: warning: rank {self._rank}, step {reading.step}: {what} memory "
                    f"{measured_bytes / GIB:.1f} GiB passes the predicted peak of {predicted_bytes / GIB:.1f} GiB",
                    flush=True,
                )


def memory_hooks(log: MemoryLog) -> list[Hook]:
    """Adds the newest reading to what is logged, before TensorBoard, W&B and the like see it; only where the recipe
    reports to one of them, so that other runs' logs stay as they are."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def log_with_memory(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            reading = log.latest()
            if reading is not None and "loss" in logs and trainer.args.report_to:
                logs = {**logs, **in_gib(reading)}
            return stock(trainer, logs, *args, **kwargs)

        return log_with_memory

    return [Hook("memory", "transformers.trainer:Trainer.log", wrap)]


def in_gib(reading: Reading) -> dict[str, float]:
    """`memory/gpu_reserved_peak_gib: 74.2`, …: what was measured, in GiB."""
    sizes = {name: n_bytes for name, n_bytes in asdict(reading).items() if name.endswith("_bytes")}
    return {f"memory/{name[:-6]}_gib": n_bytes / GIB for name, n_bytes in sizes.items() if n_bytes is not None}


def line(reading: Reading, max_steps: int) -> str:
    """`step  12/400  loss 0.6931  gpu  70.1 allocated  74.2 reserved  76.0 NVML  host   3.1  cgroup 330.1 GiB`."""
    width = len(str(max_steps))

    def size(n_bytes: int | None) -> str:
        return "    –" if n_bytes is None else f"{n_bytes / GIB:5.1f}"

    parts = [f"step {reading.step:{width}d}/{max_steps}"]
    parts.append("loss      –" if reading.loss is None else f"loss {reading.loss:.4f}")
    if reading.gpu_allocated_peak_bytes is not None:
        parts.append(
            f"gpu {size(reading.gpu_allocated_peak_bytes)} allocated {size(reading.gpu_reserved_peak_bytes)} reserved "
            f"{size(reading.gpu_nvml_used_bytes)} NVML"
        )
    parts.append(f"host {size(reading.host_rss_bytes)}")
    parts.append(f"cgroup {size(reading.cgroup_used_bytes)} GiB")
    return "  ".join(parts)


def _gpu() -> tuple[int | None, int | None, int | None]:
    """Peak allocated and reserved since the last call, and the whole card by NVML; None without CUDA."""
    if not torch.cuda.is_available():
        return None, None, None
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    # LLaMA-Factory's RECORD_VRAM logs torch's peaks just after this (0.9.5 train/callbacks.py:295); reset, they would
    # be those of no step at all. With it on, ours count from the start too.
    if os.environ.get("RECORD_VRAM", "0").lower() not in ("true", "y", "1"):
        torch.cuda.reset_peak_memory_stats()
    return allocated, reserved, nvml_used_bytes()


def nvml_used_bytes() -> int | None:
    """What all processes use of this process's card, as nvidia-smi shows it; None where NVML does not answer.

    torch.cuda.device_memory_used asks version 1, which counts what the driver keeps for itself as used; that part is
    in no capacity that torch reports.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except Exception:  # NVML missing in the container, or hiding the card: torch's figures still stand
        return None


def _int(text: str | None) -> int | None:
    return int(text) if text else None
