"""A stretch of a micro-batch, events and marks, and what every pass begins and ends with: batch, mask, embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.memory.head import (
    HeadSpec,
    embed,
)
from dpofit.memory.job import Job
from dpofit.memory.program import Event
from dpofit.memory.spec import BF16, LayerSpec
from dpofit.memory.tape import OUTERMOST, WRAPPER, Mark, Storage, Tape

INT64 = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Events and marks of one stretch; `layers` > 0 repeats them for so many from layer `first` up. `engine` owns the
    parameters."""

    phase: str
    records: tuple[Event | Mark, ...]
    layers: int = 0
    reverse: bool = False
    engine: str = "policy"
    first: int = 0


def inputs(
    job: Job, spec: LayerSpec, phase: str, clone: bool, prefix: str = "", engine: str = "policy"
) -> tuple[Part, Part, Storage | None]:
    """Token ids, attention mask and labels as int64; then what the model makes of them: rotary tables and the bool
    [rows, 1, T, T] mask of sdpa (eager's is bf16)."""
    tape = Tape(prefix + ("eval." if phase == "eval" and not prefix else ""))
    tokens = job.collated_tokens(spec.rows) * job.passes
    mask = None
    if spec.packed:  # position ids, and but for FlashAttention the mask: bf16, from the collator
        tape.new("batch", 3 * tokens * INT64, "batch")
        if spec.attention != "flash":
            mask = tape.new("mask", spec.rows * spec.tokens_per_row**2 * BF16, "attention_mask")
    elif not prefix:
        tape.new("batch", 3 * tokens * INT64, "batch")
    if clone:  # nested_detach(batch, clone=True), dpo/trainer.py:216
        tape.new("batch_clone", 3 * tokens * INT64, "batch")
    batch = Part(phase, literal(tape.cut()), engine=engine)
    family = spec.model.family
    tables = 2 * (spec.model.kinds_of_attention if family.rotary_of_each_kind else 1)
    rotary_dim = spec.model.rotary_dim or spec.model.head_dim
    tape.new("rotary", tables * spec.tokens_per_row * rotary_dim * BF16, "activations")
    if spec.attention in ("efficient", "eager") and not spec.packed:
        per_pair = 1 if spec.attention == "efficient" else BF16
        # with rows of equal length the layers that attend to all need none under sdpa
        equal = spec.attention == "efficient" and not spec.padded
        masks = 2 if family.full_attention_every and not equal else 1
        mask = tape.new("mask", masks * spec.rows * spec.tokens_per_row**2 * per_pair, "attention_mask")
    return batch, Part(phase, literal(tape.cut()), engine=engine), mask


def clones(job: Job) -> bool:
    """Does concatenated_forward copy its batch? dpo/trainer.py:216; the one of answer_logps does not."""
    return job.has_reference and not job.on("answer_logps")


def wrappers(job: Job) -> int:
    """Modules around the policy's whole model: peft's LoraModel and PeftModel, whose hook is that of the model inside,
    whose own is never called; trl's model with a value head."""
    return job.adapters + (job.recipe.stage == "rm")


def embedding(spec: LayerSpec, tape: Tape, category: str = "activations", around: int = 0) -> list[Event | Mark]:
    """`around`: of `wrappers`."""
    tape.mark("pre", OUTERMOST)  # modules without parameters of their own: their hooks prefetch
    for _ in range(around):
        tape.mark("pre", WRAPPER)
    tape.mark("pre", "model")
    embed(spec, tape, category)
    for _ in range(spec.model.layers if spec.model.family.rotary_of_each_kind else 1):  # asked for each layer's kind
        tape.mark("pre", "rotary_emb")
    return list(literal(tape.cut(), layer0=f"{tape.prefix}hidden"))


def head_spec(job: Job) -> HeadSpec:
    return HeadSpec(
        tied=job.tied_embeddings,
        outputs_cast_to_fp32=job.autocast,
        shifted_logits_copied=not job.stack.at_least("transformers", "4.49"),
        returned_wide=job.recipe.upcast_lmhead_output or not job.stack.at_least("transformers", "4.46"),
        own_loss=job.model.model_type == "qwen",
    )


def residual_bytes(spec: LayerSpec) -> int:
    return spec.hidden * spec.residual_bytes // BF16


def literal(records: list[Event | Mark], layer0: str = "") -> tuple[Event | Mark, ...]:
    """Outside a repeat a layer's storage is written with its index."""
    out: list[Event | Mark] = []
    for record in records:
        if isinstance(record, Event) and (record.shift or record.tag == layer0 or record.tag == "grad_hidden"):
            record = record._replace(tag=f"{record.tag}#{record.shift}", shift=0)
        out.append(record)
    return tuple(out)


def freed(part: Part) -> Part:
    """The end of what a part allocated."""
    events = [record._replace(size_bytes=-record.size_bytes) for record in part.records if isinstance(record, Event)]
    return Part(part.phase, tuple(events), engine=part.engine)
