"""The `dpofit.predict/1` document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dpofit.memory.meter import Peak
from dpofit.memory.predict import Prediction, Traced, reserved_without_expandable
from dpofit.recipe.notes import Note


def predict_document(prediction: Prediction, notes: Sequence[Note], traced: Traced | None = None) -> dict[str, Any]:
    """Everything of one prediction, bytes as integers; `trace` is there when the job was traced."""
    document = _document(prediction, notes)
    if traced is not None:
        phases = {name: {"allocated_bytes": size_bytes} for name, size_bytes in traced.phases.items()}
        document["trace"] = {"phases": phases, "substitutions": list(traced.substitutions)}
    return document


def _document(prediction: Prediction, notes: Sequence[Note]) -> dict[str, Any]:
    gpu, host, disk, job = prediction.gpu, prediction.host, prediction.disk, prediction.job
    cluster = job.cluster
    return {
        "schema": "dpofit.predict/1",
        "verdict": prediction.verdict,
        "verdict_by": {
            "gpu": prediction.gpu_verdict, "host": prediction.host_verdict, "disk": prediction.disk_verdict,
        },
        "gpu": {
            "capacity_bytes": gpu.capacity_bytes,
            "peak_bytes": gpu.peak_bytes,
            "low_bytes": gpu.low_bytes,
            "high_bytes": gpu.high_bytes,
            "allocated_bytes": gpu.allocated_bytes,
            "reserved_bytes": gpu.reserved.peak_bytes,
            "reserved_without_expandable_bytes": reserved_without_expandable(prediction),
            "retries_per_step": gpu.reserved.retries_per_step,
            "context_bytes": gpu.overhead.context_bytes,
            "communicators_bytes": gpu.overhead.communicators_bytes,
            "expandable_segments": gpu.expandable,
            "peak_phase": gpu.peak.phase,
            "phases": {
                name: {"allocated_bytes": peak.size_bytes, "reserved_bytes": gpu.reserved.phases.get(name)}
                for name, peak in gpu.phases.items()
            },
            "first_step": {name: {"allocated_bytes": peak.size_bytes} for name, peak in gpu.first_step.items()},
            "breakdown_at_peak": _sorted(gpu.peak),
        },
        "host": {
            "capacity_bytes": cluster.host_ram_bytes,
            "peak_bytes": host.peak_bytes,
            "low_bytes": host.low_bytes,
            "high_bytes": host.high_bytes,
            "peak_phase": host.peak_phase,
            "pinned_bytes": host.pinned_bytes,
            "breakdown_at_peak": dict(sorted(host.breakdown.items(), key=lambda item: -item[1])),
        },
        "disk": {
            "capacity_bytes": cluster.disk_bytes,
            "checkpoint_bytes": disk.checkpoint_bytes,
            "total_bytes": disk.total_bytes,
        },
        "job": {
            "recipe": job.recipe.name,
            "model": job.model.name,
            "method": job.recipe.stage if job.recipe.stage != "dpo" else _method(job.recipe.pref_loss),
            "finetuning": "qlora" if job.recipe.quantization_bit else job.recipe.finetuning,
            "zero_stage": job.zero_stage,
            "gpu": cluster.gpu.name,
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "world_size": job.world_size,
            "rows": job.rows,
            "tokens_per_row": job.row_tokens,
            "trained_parameters": job.trained_parameters,
            "parameters": job.model.parameters,
        },
        "stack": asdict(job.stack),
        "notes": [asdict(note) for note in notes],
    }  # fmt: skip


def _method(pref_loss: str) -> str:
    return pref_loss if pref_loss in ("orpo", "simpo") else "dpo"


def _sorted(peak: Peak) -> dict[str, int]:
    return dict(sorted(peak.breakdown.items(), key=lambda item: -item[1]))
