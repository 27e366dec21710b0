"""Asks the memory model about the job that is about to start, on this machine's cards or those a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpofit.errors import BadInput
from dpofit.launch.topology import Topology
from dpofit.recipe.catalogue import WrittenFor
from dpofit.recipe.long_context import written as spelled
from dpofit.units import format_gib


@dataclass(frozen=True, slots=True)
class Forecast:
    """`verdict` None: not predicted, `text` says why. Sizes are the upper ends that a run should stay below."""

    verdict: str | None
    text: str
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    checkpoint_bytes: int | None = None


def forecast(
    reference: str,
    overrides: Sequence[str],
    long_context: frozenset[str],
    topology: Topology,
    here: bool,
    written: WrittenFor | None,
    calibration: Path | None = None,
) -> Forecast:
    """Predict the job on `topology`: with this machine's cards if it trains `here`, else on an assumed cluster: the one
    that the recipe, or the one it was copied from, is `written` for, with the nodes that were named."""
    from dpofit.memory.notes import calibration_note
    from dpofit.memory.predict import predict
    from dpofit.plan import JobFlags, plan_job

    basis = ""
    if here:
        flags = JobFlags("auto", topology.nodes, topology.processes, "auto")
    elif written is not None:
        nodes = topology.nodes if topology.nodes > 1 else written.nodes
        flags = JobFlags(written.gpu, nodes, topology.processes, written.host_ram)
        basis = " (assumed: the recipe is written for it)"
    else:
        flags = JobFlags(nodes=topology.nodes, gpus_per_node=topology.processes)
        basis = " (assumed: no GPU here, and no card says what the recipe is written for)"
    flags = replace(flags, long_context=spelled(long_context), calibration=calibration)
    try:
        planned = plan_job(reference, overrides, flags)
        prediction = predict(planned.job, planned.mix)
    except BadInput as bad:
        return Forecast(None, f"not predicted: {bad.problems[0].wrong}")
    gpu, host, cluster = prediction.gpu, prediction.host, planned.job.cluster
    text = (
        f"{prediction.verdict}: {format_gib(gpu.peak_bytes)} of {format_gib(gpu.capacity_bytes)} a GPU, "
        f"{format_gib(host.peak_bytes)} of host memory a node; {cluster.nodes} x {cluster.gpus_per_node} "
        f"{cluster.gpu.name}{basis}, rows of {planned.job.row_tokens:,} tokens"
    )
    if note := calibration_note(planned.job):
        text += f"; {note.id}: {note.text}"
    return Forecast(
        prediction.verdict, text, gpu.high_bytes, host.high_bytes, getattr(prediction.disk, "checkpoint_bytes", None)
    )
