"""Runs jobs one after the other, each in a process of its own, whatever becomes of the one before."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpofit.launch.environment import cpu_variables
from dpofit.launch.inventory import read_inventory, visible_cards
from dpofit.launch.network import free_port

from .jobs import ANSWER_SHARE, ROOT, GpuJob
from .results import PACKAGES, CardRead, GpuResult, job_document, read_results, result_path, write_result

TEMPLATE_TOKENS = len("Human: " + "\nAssistant:" + "\n") + 2  # of LLaMA-Factory's `default`, with two end tokens
LEAST_S = 40.0  # a job that has less time than this left is not begun
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def read_card() -> tuple[CardRead, str] | None:
    """The first card that CUDA_VISIBLE_DEVICES leaves, and its UUID; None without one."""
    inventory = read_inventory()
    cards = visible_cards(inventory, os.environ).cards
    if not cards:
        return None
    card = cards[0]
    return CardRead(card.name, card.total_bytes, card.used_bytes, inventory.driver), card.uuid


def run_jobs(jobs: Sequence[GpuJob], results: Path, work: Path, budget_s: float, again: bool = False) -> bool:
    """Measure what `results` has not yet, most telling first, until `budget_s` are over; True when all have a result.

    A job counts as measured when its last result is of the same job and `ok`, `oom` or `skipped`.
    """
    began = time.monotonic()
    found = read_card()
    card, uuid = found if found else (None, None)
    here = {(r.name, r.card.name if r.card else None): r for r in read_results(results)} if results.is_dir() else {}
    left = []
    for job in jobs:
        known = here.get((job.name, card.name if card else None))
        done = known is not None and known.job == job_document(job) and known.outcome in ("ok", "oom", "skipped")
        if again or not done:
            left.append(job)
        else:
            print(f"{job.name}: measured already", flush=True)
    for number, job in enumerate(left):
        over_s = budget_s - (time.monotonic() - began)
        if over_s < LEAST_S:
            print(f"out of time; left for another run: {', '.join(later.name for later in left[number:])}", flush=True)
            return False
        result = measure(job, work, card, uuid, min(over_s, job.timeout_s))
        path = result_path(results, job, card)
        write_result(path, result)
        record = work / f"{job.name}.snapshot.json.gz"
        if record.exists():
            shutil.copyfile(record, path.with_suffix(".snapshot.json.gz"))
        print(f"{job.name}: {_line(result)}", flush=True)
        if all(job.model_folder != later.model_folder for later in left[number + 1 :]):
            shutil.rmtree(work / job.model_folder, ignore_errors=True)
    return True


def measure(job: GpuJob, work: Path, card: CardRead | None, uuid: str | None, timeout_s: float) -> GpuResult:
    """Run one job under `work`, for `timeout_s` at most, its model's weights included."""
    missing = [module for module in job.needs if importlib.util.find_spec(module) is None]
    folder = work / job.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ends = time.monotonic() + timeout_s
    if missing:
        return _result(job, card, "skipped", f"not installed: {', '.join(missing)}", folder, None)
    try:
        if not (work / job.model_folder).is_dir():
            (folder / "config.json").write_text(json.dumps(job.config), encoding="utf-8")
            made = _run(
                ["benchmarks.measure_gpu.weights", str(work / job.model_folder), str(folder / "config.json")],
                dict(os.environ), folder / "weights.log", ends,
            )  # fmt: skip
            if made != 0:
                return _result(job, card, "failed", _last_line(folder / "weights.log"), folder, None)
        _write_rows(job, folder)
        (folder / "recipe.json").write_text(json.dumps(job.recipe(folder), indent=1), encoding="utf-8")
        arguments = ["benchmarks.measure_gpu.inside", str(folder / "recipe.json"), str(folder / "readings.json")]
        if job.snapshot:
            arguments.append(str(work / f"{job.name}.snapshot.json.gz"))
        with _sampled(uuid) as used:
            code = _run(arguments, _environment(job, folder, uuid), folder / "log", ends)
    except subprocess.TimeoutExpired:
        return _result(job, card, "timeout", f"still running after {timeout_s:.0f} s", folder, None)
    readings = folder / "readings.json"
    error = None if code == 0 else _last_line(folder / "log")
    outcome = "ok" if code == 0 else "failed"
    if code != 0 and readings.exists():
        document = json.loads(readings.read_text(encoding="utf-8"))
        error, outcome = document["error"] or error, "oom" if document["out_of_memory"] else "failed"
    return _result(job, card, outcome, error, folder, used.highest_bytes)


def _run(module: Sequence[str], environment: Mapping[str, str], log: Path, ends: float) -> int:
    """`python -m MODULE ...` to its end; TimeoutExpired, and nothing left of it, at `ends` (monotonic seconds)."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *module], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(timeout=max(ends - time.monotonic(), 0))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _environment(job: GpuJob, folder: Path, uuid: str | None) -> dict[str, str]:
    """One rank, nothing from the network, caches in `folder`; without a card, on the CPU."""
    allocator = f"expandable_segments:{job.expandable}"
    set_here = {
        "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator, "HF_DATASETS_CACHE": f"{folder}/cache",
        "PYTHONUNBUFFERED": "1", **dict.fromkeys(_OFFLINE, "1"), **job.environment,
    }  # fmt: skip
    if uuid is None:
        set_here |= {variable.name: variable.value for variable in cpu_variables(1, len(os.sched_getaffinity(0)))}
    else:
        set_here["CUDA_VISIBLE_DEVICES"] = uuid
        set_here["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    if job.deepspeed is not None:  # as torchrun would start the only rank
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        set_here |= {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**os.environ, **set_here}


def _write_rows(job: GpuJob, folder: Path) -> None:
    """The dataset: the smoke's tokenizer makes one token of a character."""
    stage = job.settings.get("stage", "dpo")
    batch = int(job.settings.get("per_device_train_batch_size", 1))
    rows = []
    for row in [row for row in job.rows for _ in range(batch)]:
        answer = row // ANSWER_SHARE
        prompt = "p" * (row - answer - TEMPLATE_TOKENS)
        answers = (
            {"output": "c" * answer} if stage == "sft" else {"chosen": "c" * answer, "rejected": "r" * (answer // 2)}
        )
        rows.append({"instruction": prompt, **answers})
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    columns = {"prompt": "instruction", **({"response": "output"} if stage == "sft" else {})}
    if stage != "sft":
        columns |= {"chosen": "chosen", "rejected": "rejected"}
    info = {"rows": {"file_name": "rows.json", "ranking": stage != "sft", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


@dataclass(slots=True)
class _Used:
    highest_bytes: int | None = None


@contextlib.contextmanager
def _sampled(uuid: str | None) -> Iterator[_Used]:
    """The most that NVML says is used of the card, looked at every 10 ms."""
    used, stop = _Used(), threading.Event()
    if uuid is None:
        yield used
        return
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def look() -> None:
        while not stop.wait(0.01):
            now_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
            used.highest_bytes = max(used.highest_bytes or 0, now_bytes)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield used
    finally:
        stop.set()
        thread.join()


def _result(
    job: GpuJob, card: CardRead | None, outcome: str, error: str | None, folder: Path, nvml_bytes: int | None
) -> GpuResult:
    path = folder / "readings.json"
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    steps = read.get("steps", [])
    readings = [reading for step in steps for reading in step.values()]
    others = card.used_by_others_bytes if card else 0

    def highest(values: list[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    ends = [step["end"] for step in steps if step.get("end", {}).get("nvml_bytes") is not None]
    return GpuResult(
        job=job_document(job),
        outcome=outcome,
        error=error,
        date=datetime.now(UTC).date().isoformat(),
        commit=_commit(),
        card=card,
        versions=_versions(),
        batches=read.get("batches", []),
        allocated_peak_bytes=highest([reading.get("allocated_peak_bytes") for reading in readings]),
        reserved_peak_bytes=highest([reading.get("reserved_peak_bytes") for reading in readings]),
        nvml_peak_bytes=None if nvml_bytes is None else nvml_bytes - others,
        context_bytes=highest([end["nvml_bytes"] - end["reserved_bytes"] - others for end in ends]),
        retries=highest([reading.get("retries") for reading in readings]),
        host_rss_peak_bytes=read.get("host_rss_peak_bytes"),
        host_pinned_peak_bytes=read.get("host_pinned_peak_bytes"),
        step_seconds=[round(step["end"]["time"] - step["begin"]["time"], 3) for step in steps if "end" in step],
        steps=steps,
    )


def _line(result: GpuResult) -> str:
    def gib(n_bytes: int | None) -> str:
        return "-" if n_bytes is None else f"{n_bytes / 2**30:.2f}"

    seconds = ", ".join(f"{second:.1f}" for second in result.step_seconds)
    return (
        f"{result.outcome}  allocated {gib(result.allocated_peak_bytes)}  reserved {gib(result.reserved_peak_bytes)}  "
        f"NVML {gib(result.nvml_peak_bytes)}  host {gib(result.host_rss_peak_bytes)} GiB  steps {seconds or '-'} s"
        + (f"  {result.error}" if result.error else "")
    )


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package).partition("+")[0]
    return found


def _commit() -> str | None:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or None


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "died without a word"
