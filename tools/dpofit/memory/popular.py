"""Why popular memory savers do not save this job: each one tried on it, and what they did said in figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dpofit.memory.advise import MOST_NODES, Advice, Workbench
from dpofit.memory.job import LIGER_MODEL_TYPES
from dpofit.memory.levers import OFFLOAD, Change, nodes_lever
from dpofit.memory.predict import Prediction, default_mix, expandable_segments
from dpofit.memory.screen import Screen, screen
from dpofit.recipe.long_context import PIECES
from dpofit.units import format_gib

STATES = ("weights", "reference", "optimizer", "gradients")  # what ZeRO can share out and offload


@dataclass(frozen=True, slots=True)
class NoHelp:
    """A popular change that would not make the job fit. Bytes: of one GPU's allocated peak saved, of a node's host
    memory added; None when it can't be tried (on already, refused)."""

    id: str
    change: str
    why: str
    gpu_saved_bytes: int | None = None
    host_added_bytes: int | None = None


def would_not_help(bench: Workbench, advice: Advice) -> list[NoHelp]:
    """Those of the popular changes that are not among the suggestions; of a job that fits, only the long-context
    pieces that raise its peak."""
    base, before = advice.base, bench.screen(())
    if before is None:
        return []
    if base.verdict == "fits":
        return list(_pieces(bench, base, before))
    suggested = {change.id for suggestion in advice.suggestions for change in suggestion.changes}
    questions: tuple[Callable[[Workbench, Prediction, Screen], Iterator[NoHelp]], ...] = (
        _liger, _accumulation, _offload, _unsloth_gc, _checkpointing, _expandable, _flash_attention, _micro_batch,
        _rank, _optimizer_8bit, _more_gpus, _pieces,
    )  # fmt: skip
    return [found for ask in questions for found in ask(bench, base, before)
            if not suggested & ({found.id} if found.id != "offload" else set(OFFLOAD))]  # fmt: skip


# Why a long-context piece can cost memory (traced: docs/long-context.md).
PIECE_COSTS = {
    "cached_reference": "with one forward a step DeepSpeed knows what comes next and gathers it ahead",
    "tiled_mlp": "rows are so short that the weights' sums in fp32 are larger than what tiles save",
}


def _pieces(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    """Pieces that are on and raise this job's peak."""
    for piece in PIECES:
        if not base.job.on(piece):
            continue
        rest = base.job.recipe.long_context - {piece}
        job = replace(base.job, recipe=replace(base.job.recipe, long_context=rest))
        without = screen(job, bench.mix or default_mix(job))
        raised = before.allocated_bytes - without.allocated_bytes
        if raised > 0.01 * before.allocated_bytes:
            why = f"on; allocated peak {format_gib(without.allocated_bytes)} → {format_gib(before.allocated_bytes)}"
            cause = f": {PIECE_COSTS[piece]}" if piece in PIECE_COSTS else ""
            yield NoHelp(f"piece-{piece}", f"{piece} of --long-context", f"{why}{cause}", -raised)


def _tried(bench: Workbench, change: Change, before: Screen) -> tuple[int, int, str] | None:
    """Bytes saved on a GPU, bytes added to a node's host, and both in words; None when refused."""
    after = bench.screen([change])
    if after is None:
        return None
    saved = before.allocated_bytes - after.allocated_bytes
    added = after.host.peak_bytes - before.host.peak_bytes
    words = f"allocated peak {format_gib(before.allocated_bytes)} → {format_gib(after.allocated_bytes)}"
    return saved, added, words


def _logits(base: Prediction) -> str:
    size = base.gpu.peak.breakdown.get("logits", 0)
    return f"logits of {base.job.rows} rows x {base.job.model.vocab_size:,} words: {format_gib(size)} at the peak"


def _liger(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    line, job = "enable_liger_kernel=true", base.job
    stay = f"DPO needs its {_logits(base)}; LLaMA-Factory turns Liger's fused loss off for it" if job.preference else (
        "its fused loss is already counted"
    )  # fmt: skip
    if job.recipe.liger:
        kind = f"Liger has no kernels for {job.model.model_type}" if not job.liger else stay
        yield NoHelp("liger", line, f"on already; {kind}")
        return
    if job.model.model_type not in LIGER_MODEL_TYPES:
        yield NoHelp("liger", line, f"LLaMA-Factory has no Liger kernels for {job.model.model_type}")
        return
    tried = _tried(bench, Change("liger", "same", "liger", "", (line,)), before)
    if tried:
        yield NoHelp("liger", line, f"{tried[2]}; {stay if job.preference else 'not enough'}", tried[0], tried[1])


def _accumulation(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    line = f"gradient_accumulation_steps={2 * base.job.recipe.gradient_accumulation}"
    tried = _tried(bench, Change("accumulation", "same", "accumulation", "", (line,)), before)
    if tried:
        what = f"one micro-batch of {base.job.rows} rows x {base.job.row_tokens:,} tokens makes the peak"
        yield NoHelp("accumulation", line, f"{tried[2]}: {what}, however many follow", tried[0], tried[1])


def _offload(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    line, job = f"deepspeed={OFFLOAD['z3-offload']}", base.job
    states = sum(base.gpu.peak.breakdown.get(name, 0) for name in STATES)
    rest = sum(base.gpu.peak.breakdown.values()) - states
    moves = f"it moves states ({format_gib(states)} at the peak), not activations and logits ({format_gib(rest)})"
    if job.recipe.zero is not None and job.recipe.zero.offload_param == "cpu":
        yield NoHelp("offload", line, f"on already; {moves}")
        return
    if job.recipe.quantization_bit is not None:
        yield NoHelp("offload", line, f"a quantized base is not modelled under ZeRO-3; {moves}")
        return
    extra = ("pure_bf16=false", "bf16=true") if job.recipe.pure_bf16 else ()
    optim = ("optim=adamw_torch",) if "8bit" in job.recipe.optim or "paged" in job.recipe.optim else ()
    tried = _tried(bench, Change("z3-offload", "same", "sharding", "", (line, *extra, *optim)), before)
    if tried:
        host = f"a node's host memory {format_gib(before.host.peak_bytes)} → "
        host += format_gib(before.host.peak_bytes + tried[1])
        yield NoHelp("offload", line, f"{tried[2]}: {moves}; {host}", tried[0], tried[1])


def _unsloth_gc(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    line, job = "use_unsloth_gc=true", base.job
    if job.recipe.use_unsloth_gc:
        yield NoHelp(
            "unsloth-gc", line, f"on already; it is why {format_gib(base.host.pinned_bytes)} a node are pinned"
        )
        return
    if not job.recipe.gradient_checkpointing:
        yield NoHelp("unsloth-gc", line, "gradient checkpointing is off: there are no checkpoints to move")
        return
    tried = _tried(bench, Change("unsloth-gc", "same", "unsloth-gc", "", (line,)), before)
    if tried:
        checkpoints = base.gpu.peak.breakdown.get("checkpoints", 0)
        what = f"only the checkpoints leave ({format_gib(checkpoints)} at the peak)"
        pins = f"{format_gib(max(tried[1], 0))} more host memory a node, pinned in powers of two and never returned"
        yield NoHelp("unsloth-gc", line, f"{tried[2]}: {what}, for {pins}", tried[0], tried[1])


def _checkpointing(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    if base.job.recipe.gradient_checkpointing:
        why = "LLaMA-Factory checkpoints already unless disable_gradient_checkpointing is true"
        yield NoHelp("checkpointing", "gradient_checkpointing=true", why)


def _expandable(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    if expandable_segments(base.job):
        gap = base.gpu.reserved.peak_bytes - base.gpu.allocated_bytes
        why = f"on already; reserved is {format_gib(gap)} over allocated, the rest is really in use"
        yield NoHelp("expandable-segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", why)


def _flash_attention(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    line, job = "flash_attn=fa2", base.job
    if job.recipe.flash_attn in ("fa2", "fa3"):
        yield NoHelp("fa2", line, "on already")
    elif not job.cluster.gpu.bf16:
        yield NoHelp("fa2", line, f"FlashAttention-2 does not run on {job.cluster.gpu.name} (before Ampere)")
    elif tried := _tried(bench, Change("fa2", "same", "attention", "", (line,)), before):
        mask = f"the mask it does without: {format_gib(base.gpu.peak.breakdown.get('attention_mask', 0))} at the peak"
        yield NoHelp("fa2", line, f"{tried[2]}; {mask}", tried[0], tried[1])


def _micro_batch(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    if base.job.recipe.micro_batch == 1:
        rows = "a pair is two rows, and they go together" if base.job.pairs else "one row is the least"
        yield NoHelp("micro-batch-1", "per_device_train_batch_size=1", f"1 already; {rows}")


def _rank(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    job = base.job
    if not job.adapters or job.recipe.lora_rank <= 1:
        return
    line = f"lora_rank={job.recipe.lora_rank // 2}"
    if tried := _tried(bench, Change("rank", "trains", "rank", "", (line,)), before):
        adapters = f"{job.trained_parameters:,} of {job.model.parameters:,} parameters are trained"
        yield NoHelp("rank", line, f"{tried[2]}: {adapters}", tried[0], tried[1])


def _optimizer_8bit(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    line, zero = "optim=adamw_8bit", base.job.recipe.zero
    if zero is not None and zero.offload_optimizer != "none":
        yield NoHelp("adam-8bit", line, "the optimizer is on the CPU already")
    elif tried := _tried(bench, Change("adam-8bit", "trains", "optimizer", "", (line,)), before):
        states = format_gib(base.gpu.peak.breakdown.get("optimizer", 0))
        yield NoHelp("adam-8bit", line, f"{tried[2]}: optimizer states are {states} at the peak", tried[0], tried[1])


def _more_gpus(bench: Workbench, base: Prediction, before: Screen) -> Iterator[NoHelp]:
    nodes = max(MOST_NODES, 2 * base.job.cluster.nodes)
    if tried := _tried(bench, nodes_lever(nodes, base.job.cluster.gpus_per_node), before):
        sharded = "what ZeRO shares out shrinks, activations and logits do not"
        why = sharded if base.job.zero_stage else "without ZeRO every GPU holds everything"
        yield NoHelp("nodes", f"--nodes {nodes}", f"{tried[2]}: {why}", tried[0], tried[1])
