"""One JSON a measured job: what ran, on what, and what was read. Null: nothing to read it from (no card, it died)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpofit.hardware.cluster import Gpu
from dpofit.hardware.nvml import Reading, tightest
from dpofit.memory.job import PINNED, Stack

from .jobs import GpuJob

FOLDER = Path(__file__).resolve().parents[1] / "results" / "gpu"
SCHEMA = "dpofit.gpu-result/1"
PACKAGES = ("torch", "llamafactory", "transformers", "trl", "peft", "accelerate", "deepspeed", "liger-kernel")


@dataclass(frozen=True, slots=True)
class CardRead:
    """The card before anything ran on it, as NVML sees it; `usable_bytes` is what torch will call total."""

    name: str
    usable_bytes: int
    used_by_others_bytes: int
    driver: str

    @property
    def gpu(self) -> Gpu:
        """dpofit's profile of it, with this card's own capacity."""
        return tightest([Reading(self.name, "", self.usable_bytes, 0, (8, 0))])


@dataclass(frozen=True, slots=True)
class GpuResult:
    """`outcome`: ok, oom (CUDA ran out), failed, timeout, skipped (`error` says why)."""

    job: dict[str, Any]  # GpuJob as it was
    outcome: str
    error: str | None
    date: str
    commit: str | None
    card: CardRead | None
    versions: dict[str, str]
    batches: list[list[int]]  # [rows, tokens] of each step
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    nvml_peak_bytes: int | None  # sampled during the run, less what others held before
    context_bytes: int | None  # NVML less reserved at the end of a step, less what others held: the highest
    retries: int | None
    host_rss_peak_bytes: int | None
    host_pinned_peak_bytes: int | None
    step_seconds: list[float]
    steps: list[dict[str, Any]]  # the readings themselves

    @property
    def name(self) -> str:
        return str(self.job["name"])

    @property
    def stack(self) -> Stack:
        """The versions that decide what a step costs."""
        own = asdict(PINNED)
        return Stack(**{library: self.versions.get(library, version) for library, version in own.items()})

    @property
    def gpu_job(self) -> GpuJob:
        return GpuJob(**{**self.job, "rows": tuple(self.job["rows"]), "needs": tuple(self.job["needs"])})


def job_document(job: GpuJob) -> dict[str, Any]:
    """The job as its result holds it (JSON's own types)."""
    document: dict[str, Any] = json.loads(json.dumps(asdict(job)))
    return document


def result_path(folder: Path, job: GpuJob, card: CardRead | None) -> Path:
    """`NAME.CARD.json`."""
    return folder / f"{job.name}.{card.gpu.name.replace(' ', '-') if card else 'cpu'}.json"


def write_result(path: Path, result: GpuResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, **asdict(result)}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_results(folder: Path = FOLDER) -> Sequence[GpuResult]:
    """Every result of `folder`, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        assert document.pop("schema") == SCHEMA, path
        card = document.pop("card")
        found.append(GpuResult(card=CardRead(**card) if card else None, **document))
    return found
