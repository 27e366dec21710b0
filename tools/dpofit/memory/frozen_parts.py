"""Forwards without gradients: layers, the reference, and the mismatched answers of KTO."""

from __future__ import annotations

from dataclasses import replace

from dpofit.memory.answer_head import answer_log_probs
from dpofit.memory.bands import Band
from dpofit.memory.head import (
    LOGITS,
    final_states,
    log_probs,
    logits,
)
from dpofit.memory.job import Job
from dpofit.memory.layer import decoder_layer
from dpofit.memory.layer_parts import capture
from dpofit.memory.part import Part, clones, embedding, freed, head_spec, inputs, literal, residual_bytes, wrappers
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.memory.program import Event
from dpofit.memory.spec import LayerSpec
from dpofit.memory.tape import Storage, Tape, Value

KL = ".kl"  # after an engine's name: its second forward of a KTO step


def reference(job: Job, phase: str = "reference_forward", rows: int | None = None) -> list[Part]:
    """The reference's forward under no_grad: a second model, the policy with its adapters off, or, before step 1, the
    policy as it is."""
    spec = job.layer_spec(rows or job.rows, trained=not job.reference_copy)
    bands = job.bands
    if job.reference_copy or job.adapters:
        spec = replace(spec, lora_active=False, trained=frozenset())
        bands = (Band(0, job.model.layers, frozenset(), job.recipe.gradient_checkpointing, False, False),)
    engine = "reference" if job.reference_copy else "policy"
    tape = Tape("reference.", grad=False)
    parts, wide = _frozen_forward(job, spec, bands, tape, phase, engine)
    if job.passes > 1:
        parts += kl_pass(job, spec, bands, phase, engine, "reference.")
        wide = split_by_tag(tape, wide)
    tape.drop(wide)
    return [*parts, Part(phase, literal(tape.cut()), engine=engine)]


def kl_pass(
    job: Job, spec: LayerSpec, bands: tuple[Band, ...], phase: str, engine: str, prefix: str = ""
) -> list[Part]:
    """KTO's forward of the mismatched answers, without gradients (train/kto/trainer.py:187-194)."""
    if not job.adapters_switched_off:  # that forward undoes the engine's trace
        engine = f"{engine}{KL}"
    tape = Tape(f"{prefix}kl.", grad=False)
    parts, wide = _frozen_forward(job, spec, bands, tape, phase, engine)
    tape.drop(wide)
    return [*parts, Part(phase, literal(tape.cut()), engine=engine)]


def split_by_tag(tape: Tape, wide: Storage | None) -> Storage | None:
    """KTO's chosen_logits and rejected_logits: copies by a mask, where DPO has views."""
    if wide is None:
        return None
    copies = tape.new("logits.by_tag", wide.size_bytes, LOGITS)
    tape.drop(wide)
    return copies


def _frozen_forward(
    job: Job, spec: LayerSpec, bands: tuple[Band, ...], tape: Tape, phase: str, engine: str
) -> tuple[list[Part], Storage | None]:
    """A forward without gradients, to its log-probs; and the fp32 logits, held."""
    batch, made, mask = inputs(job, spec, phase, clone=clones(job), prefix=tape.prefix, engine=engine)
    parts = [batch, made]
    layers, casts = frozen_layers(job, spec, bands, tape, phase, engine, mask)
    parts += layers
    hidden = Value(Storage(f"{tape.prefix}hidden", residual_bytes(spec), "activations", shift=job.model.layers), False)
    outside, states = final_states(spec, tape, hidden, job.collated_tokens(spec.rows))
    parts += [Part(phase, literal(tape.cut()), engine=engine), freed(made)]
    wide: Storage | None = None
    if job.on("answer_logps"):
        result, _ = answer_log_probs(outside, tape, states, head_spec(job), job.answer_tokens(spec.rows))
        tape.drop(states.storage)
        parts += [Part(phase, literal(tape.cut()), engine=engine), *casts]
    else:
        output, _ = logits(outside, tape, states, head_spec(job))
        tape.drop(states.storage)
        parts += [Part(phase, literal(tape.cut()), engine=engine), *casts]
        result, wide = log_probs(outside, tape, output)
    tape.drop(result.storage)
    parts.append(Part(phase, literal(tape.cut()), engine=engine))
    return [*parts, freed(batch)], wide


def frozen_layers(
    job: Job, spec: LayerSpec, bands: tuple[Band, ...], tape: Tape, phase: str, engine: str, mask: Storage | None
) -> tuple[list[Part], list[Part]]:
    """Embedding and layers without gradients: only the residual passes from layer to layer. Also the ends of each
    layer's copies of weights that autocast keeps to the end of the forward."""
    residual = residual_bytes(spec)
    held = Part(phase, (Event(f"{tape.prefix}inputs_embeds", residual, "activations"),), engine=engine)
    around = wrappers(job) if engine.startswith("policy") else 0
    parts = [Part(phase, tuple(embedding(spec, tape, around=around)), engine=engine), held]
    ends = []
    # a LoRA reference is the policy in training mode: unsloth's forward copies its input to the host all the same
    training = phase == "forward" or (phase == "reference_forward" and job.adapters_switched_off)
    unsloth = job.recipe.use_unsloth_gc and engine.startswith("policy") and training
    for band in bands:
        x = Value(Storage(f"{tape.prefix}hidden", residual, "activations"), False)
        layer = Tape(tape.prefix, grad=False)
        layer.weight_casts = []
        block: Storage | None = None
        if unsloth and band.checkpointed:
            block = layer.new("unsloth_block", pinned_block_bytes(residual), "unsloth_gc", "host_pinned")
        y = decoder_layer(spec.in_band(band), layer, x, mask)
        layer.drop(block)
        y.storage.tag, y.storage.shift = f"{tape.prefix}hidden", 1
        layer.drop(x.storage)
        capture(job, layer, x)
        parts.append(Part(phase, tuple(layer.cut()), band.count, engine=engine, first=band.first))
        layer.drop(*layer.weight_casts)
        if end := tuple(layer.cut()):
            ends.append(Part(phase, end, band.count, engine=engine, first=band.first))
    return [*parts, freed(held)], ends
