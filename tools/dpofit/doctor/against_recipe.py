"""Sets what a log says beside what the recipe needs: which tensor an allocation failed on, what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpofit.doctor.cause import Report
from dpofit.doctor.checks import decoded, gib
from dpofit.doctor.facts import LogFacts
from dpofit.doctor.oom import read_oom
from dpofit.doctor.tensors import Shape
from dpofit.errors import BadInput


def with_recipe(report: Report, reference: str) -> Report:
    """The report with sentences about this recipe added to the first finding's cause, when it is about memory.

    Raises BadInput when the recipe cannot be read. What the memory model does not cover is said, not guessed.
    """
    from dpofit.models.known import find_model
    from dpofit.recipe.load import load_recipe

    recipe = load_recipe(reference).recipe
    if report.root is None or not report.findings or not report.root.diagnosis.startswith("memory."):
        return report
    sentences: list[str | None] = []
    message = report.root.groups.get("message")
    if message:
        model = find_model(recipe.model, recipe.source.parent)
        shape = Shape(
            model.vocab_size, model.hidden_size, model.intermediate_size, model.heads, model.kv_heads, model.layers,
            model.head_dim, model.parameters,
        )  # fmt: skip
        micro_batch = recipe.eval_micro_batch if report.root.place.phase == "eval" else recipe.micro_batch
        rows = micro_batch * (2 if recipe.stage in ("dpo", "rm") else 1)
        eager = recipe.flash_attn == "disabled"
        sentences.append(decoded(message, shape, rows, recipe.cutoff_len, _world_size(report.logs), eager))
    sentences.append(_predicted(report, reference, message))
    first = replace(report.findings[0], cause=" ".join(filter(None, [report.findings[0].cause, *sentences])))
    return replace(report, findings=(first, *report.findings[1:]))


def _world_size(logs: Sequence[LogFacts]) -> int | None:
    return next((log.world_size for log in logs if log.world_size), None)


def _predicted(report: Report, reference: str, message: str | None) -> str:
    """What `dpofit predict` says of the recipe on the cluster that the log shows, as far as it shows one."""
    from dpofit.memory.predict import predict
    from dpofit.plan import JobFlags, plan_job

    world_size = _world_size(report.logs)
    total = read_oom(message).total_bytes if message else None
    flags = JobFlags(gpu=f"{total / 2**30:.2f}GiB" if total else None)
    if world_size:
        per_node = max(count for count in range(1, 9) if world_size % count == 0)
        flags = replace(flags, nodes=world_size // per_node, gpus_per_node=per_node)
    try:
        planned = plan_job(reference, [], flags)
        prediction = predict(planned.job, planned.mix)
    except BadInput as bad:
        return f"No prediction for this recipe: {bad.problems[0]}."
    cluster = planned.job.cluster
    on = f"{cluster.nodes} x {cluster.gpus_per_node} GPUs"
    if message:
        peak, capacity = prediction.gpu.peak_bytes, prediction.gpu.capacity_bytes
        return f"Predicted: {gib(peak)} on {gib(capacity)} ({on}, rows of cutoff_len); see dpofit advise {reference}."
    return f"Predicted peak of a node's memory: {gib(prediction.host.peak_bytes)} ({on}, rows of cutoff_len)."
