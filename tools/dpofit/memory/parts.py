"""The stretches of one micro-batch, in order: embedding, layers, head, reference, loss, backward; events and marks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpofit.memory.head import (
    HeadSpec,
    causal_lm_loss,
    converted,
    embed,
    embed_backward,
    fused_causal_lm_loss,
    log_probs,
    logits,
)
from dpofit.memory.job import Job
from dpofit.memory.layer import decoder_layer
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.memory.program import Event
from dpofit.memory.spec import BF16, LayerSpec
from dpofit.memory.tape import Mark, Storage, Tape, Value

INT64 = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Events and marks of one stretch; `layers` > 0 repeats them for each layer. `engine` owns the parameters."""

    phase: str
    records: tuple[Event | Mark, ...]
    layers: int = 0
    reverse: bool = False
    engine: str = "policy"


def micro_batch(job: Job) -> list[Part]:
    """Forward, reference, loss and backward of one training micro-batch."""
    spec = job.layer_spec(job.rows, trained=True)
    layers = job.model.layers
    batch, made, mask = _inputs(job, spec, "forward", clone=job.has_reference)
    parts = [batch, made]
    tape = Tape()
    kept = "checkpoints" if job.recipe.gradient_checkpointing else "activations"
    parts.append(Part("forward", tuple(_embedding(spec, tape, kept))))
    forward, backward, casts = _layer_templates(job, spec, mask)
    held = _held_embedding(job, spec)
    parts += [*held, Part("forward", forward, layers), *map(_freed, held)]

    hidden = Value(Storage("hidden", _residual_bytes(spec), kept, shift=layers), True)
    head, result, outputs, waiting = _head_and_loss(job, spec, tape, hidden, "forward", casts)
    parts += head if job.recipe.gradient_checkpointing else [head[0], _freed(made), *head[1:]]
    if job.has_reference:
        parts += _reference(job)
    tape.drop(outputs)
    loss_grad = tape.new("loss_grad", 512, "activation_grads")
    parts.append(Part("loss", _literal(tape.cut())))

    tape.give(result, loss_grad)
    tape.run_backward()
    tape.drop(result.storage)
    assert hidden.grad is not None
    hidden.grad.tag, hidden.grad.shift = "grad_hidden", layers
    parts.append(Part("backward", _literal(tape.cut())))
    parts.append(Part("backward", backward, layers, reverse=True))
    tail = Tape()
    embed_backward(spec, tail, waiting[0] if waiting else None)
    tail.drop(Storage("grad_hidden", _residual_bytes(spec), "activation_grads"))
    parts.append(Part("backward", _literal(tail.cut())))
    ends = [replace(_freed(batch), phase="backward")]
    if job.recipe.gradient_checkpointing:  # checkpoints keep the layers' arguments
        ends.append(replace(_freed(made), phase="backward"))
    return parts + ends


def evaluation(job: Job) -> list[Part]:
    """One evaluation batch: no gradients; the reference too."""
    spec = job.layer_spec(job.eval_rows, trained=True)
    batch, made, mask = _inputs(job, spec, "eval", clone=job.has_reference)
    parts = [batch, made]
    tape = Tape("eval.", grad=False)
    layers, casts = _frozen_layers(job, spec, tape, "eval", "policy", mask)
    parts += layers
    hidden = Value(Storage("eval.hidden", _residual_bytes(spec), "activations", shift=job.model.layers), False)
    head, result, held, _ = _head_and_loss(job, spec, tape, hidden, "eval", casts)
    parts += [head[0], _freed(made), *head[1:]]
    tape.drop(result.storage)
    if job.has_reference:
        parts += _reference(job, "eval", job.eval_rows)
    tape.drop(held)
    return [*parts, Part("eval", _literal(tape.cut())), _freed(batch)]


def _head_and_loss(
    job: Job, spec: LayerSpec, tape: Tape, hidden: Value, phase: str, casts: tuple[Event | Mark, ...]
) -> tuple[list[Part], Value, Storage | None, list[Storage]]:
    """Parts; the loss or log-probs; what the caller still holds of the outputs; a tied head's waiting gradient.

    The model's forward ends, and with it autocast's cache of weights, before DPO's log-probs but after SFT's loss.
    """
    head = _head_spec(job)
    output = held = None
    if job.fused_loss and tape.grad:
        result, waiting = fused_causal_lm_loss(spec, tape, hidden, head)
    else:
        output, normed, waiting = logits(spec, tape, hidden, head)
        if not job.preference:
            result, held = causal_lm_loss(spec, tape, output, head)
        tape.drop(normed)
    inside = Part(phase, _literal(tape.cut()))
    cache_ends = Part(phase, casts, job.model.layers)
    if job.preference:
        assert output is not None
        result, held = log_probs(spec, tape, output)
    elif held is not None:
        held = converted(spec, tape, held, head)
    return [inside, cache_ends, Part(phase, _literal(tape.cut()))], result, held, waiting


def _reference(job: Job, phase: str = "reference_forward", rows: int | None = None) -> list[Part]:
    """The reference's forward under no_grad: a second model, or the policy with its adapters off."""
    spec = job.layer_spec(rows or job.rows, trained=not job.reference_copy)
    spec = replace(spec, lora_active=False, weights_trained=False)
    engine = "reference" if job.reference_copy else "policy"
    batch, made, mask = _inputs(job, spec, phase, clone=True, prefix="reference.")
    parts = [batch, made]
    tape = Tape("reference.", grad=False)
    parts += _frozen_layers(job, spec, tape, phase, engine, mask)[0]
    hidden = Value(Storage("reference.hidden", _residual_bytes(spec), "activations", shift=job.model.layers), False)
    output, normed, _ = logits(spec, tape, hidden, _head_spec(job))
    tape.drop(normed)
    parts += [Part(phase, _literal(tape.cut()), engine=engine), _freed(made)]
    result, wide = log_probs(spec, tape, output)
    tape.drop(wide, result.storage)
    parts.append(Part(phase, _literal(tape.cut()), engine=engine))
    return [*parts, _freed(batch)]


def _frozen_layers(
    job: Job, spec: LayerSpec, tape: Tape, phase: str, engine: str, mask: Storage | None
) -> tuple[list[Part], tuple[Event | Mark, ...]]:
    """Embedding and layers without gradients: only the residual passes from layer to layer. Also each layer's copies
    of weights that autocast keeps to the end of the forward."""
    embedding = Part(phase, tuple(_embedding(spec, tape)), engine=engine)
    x = Value(Storage(f"{tape.prefix}hidden", _residual_bytes(spec), "activations"), False)
    layer = Tape(tape.prefix, grad=False)
    layer.weight_casts = []
    block: Storage | None = None
    if job.recipe.use_unsloth_gc and job.recipe.gradient_checkpointing and engine == "policy" and phase != "eval":
        # a LoRA reference is the policy in training mode: unsloth's forward copies its input to the host all the same
        block = layer.new("unsloth_block", pinned_block_bytes(_residual_bytes(spec)), "unsloth_gc", "host_pinned")
    y = decoder_layer(spec, layer, x, mask)
    layer.drop(block)
    y.storage.tag, y.storage.shift = f"{tape.prefix}hidden", 1
    layer.drop(x.storage)
    forward = Part(phase, tuple(layer.cut()), job.model.layers, engine=engine)
    layer.drop(*layer.weight_casts)
    inputs_embeds = Event(f"{tape.prefix}inputs_embeds", _residual_bytes(spec), "activations")
    held = Part(phase, (inputs_embeds,), engine=engine)
    return [embedding, held, forward, _freed(held)], tuple(layer.cut())


def _held_embedding(job: Job, spec: LayerSpec) -> list[Part]:
    """The model's forward holds the embeddings under a name of their own (modeling_qwen2.py inputs_embeds) while its
    layers run; with checkpoints on the GPU they are the first of these anyway."""
    if job.recipe.gradient_checkpointing and not job.recipe.use_unsloth_gc:
        return []
    return [Part("forward", (Event("inputs_embeds", _residual_bytes(spec), "activations"),))]


def _layer_templates(
    job: Job, spec: LayerSpec, mask: Storage | None
) -> tuple[tuple[Event | Mark, ...], tuple[Event | Mark, ...], tuple[Event | Mark, ...]]:
    """Forward and backward records of one layer under the job's gradient checkpointing, and the end of the weight
    copies that autocast keeps from the one to the end of the whole forward."""
    residual = _residual_bytes(spec)
    recipe = job.recipe
    x = Value(Storage("hidden", residual, "checkpoints" if recipe.gradient_checkpointing else "activations"), True)
    gradient = Storage("grad_hidden", residual, "activation_grads", shift=1)
    if not recipe.gradient_checkpointing:
        tape = Tape()
        y = decoder_layer(spec, tape, x, mask)
        y.storage.tag, y.storage.shift = "hidden", 1
        tape.drop(x.storage)
        forward = tuple(tape.cut())
        y.grad = gradient
        tape.run_backward()
        return forward, _finish_backward(tape, x, gradient), ()

    tape = Tape(grad=False)
    tape.weight_casts = []
    block: Storage | None = None
    if recipe.use_unsloth_gc:
        block = tape.new("unsloth_block", pinned_block_bytes(residual), "unsloth_gc", "host_pinned")
    y = decoder_layer(spec, tape, x, mask)
    y.storage.tag, y.storage.shift, y.storage.category = "hidden", 1, "checkpoints"
    if recipe.use_unsloth_gc:
        tape.drop(x.storage)
    forward = tuple(tape.cut())
    tape.drop(*tape.weight_casts)
    casts = tuple(tape.cut())

    tape = Tape("again.", grad=True)
    if recipe.use_unsloth_gc:
        x = Value(tape.new("hidden_back", residual, "checkpoints"), True)
    else:
        x = Value(Storage("hidden", residual, "checkpoints"), True)
    y = decoder_layer(spec, tape, x, mask)
    if recipe.use_reentrant_gc or recipe.use_unsloth_gc:
        y.grad = tape.hold(gradient)  # CheckpointFunction.backward's arguments hold the incoming gradient to the end
        tape.run_backward()
        tape.drop(y.storage, gradient)
    else:  # torch/utils/checkpoint.py _checkpoint_without_reentrant_generator: only what autograd saved comes back
        tape.drop(y.storage)
        y.grad = gradient
        tape.run_backward()
    backward = _finish_backward(tape, x, gradient)
    if block is not None:
        backward += (Event(block.tag, -block.size_bytes, block.category, block.space),)
    return forward, backward, casts


def _finish_backward(tape: Tape, x: Value, incoming: Storage) -> tuple[Event | Mark, ...]:
    """Name the gradient of the layer's input for the layer below, and let go of the input."""
    assert x.grad is not None
    if x.storage.holders:
        tape.drop(x.storage)
    if x.grad is incoming:  # the residual stream's gradient was added to in place: the same storage under a new name
        events = tape.cut()
        name = Event(incoming.tag, incoming.size_bytes, incoming.category)
        return (*events, name._replace(size_bytes=-name.size_bytes, shift=1), name)
    x.grad.tag, x.grad.shift = "grad_hidden", 0
    return tuple(tape.cut())


def _inputs(job: Job, spec: LayerSpec, phase: str, clone: bool, prefix: str = "") -> tuple[Part, Part, Storage | None]:
    """Token ids, attention mask and labels as int64; then what the model makes of them: rotary tables and the bool
    [rows, 1, T, T] mask of sdpa (eager's is bf16)."""
    tape = Tape(prefix + ("eval." if phase == "eval" and not prefix else ""))
    engine = "reference" if prefix and job.reference_copy else "policy"
    if not prefix:
        tape.new("batch", 3 * spec.tokens * INT64, "batch")
    if clone:  # nested_detach(batch, clone=True), dpo/trainer.py:216
        tape.new("batch_clone", 3 * spec.tokens * INT64, "batch")
    batch = Part(phase, _literal(tape.cut()), engine=engine)
    tape.new("rotary", 2 * spec.tokens_per_row * spec.model.head_dim * BF16, "activations")
    mask = None
    if spec.attention in ("efficient", "eager"):
        per_pair = 1 if spec.attention == "efficient" else BF16
        mask = tape.new("mask", spec.rows * spec.tokens_per_row**2 * per_pair, "attention_mask")
    return batch, Part(phase, _literal(tape.cut()), engine=engine), mask


def _freed(part: Part) -> Part:
    """The end of what a part allocated."""
    events = [record._replace(size_bytes=-record.size_bytes) for record in part.records if isinstance(record, Event)]
    return Part(part.phase, tuple(events), engine=part.engine)


def _embedding(spec: LayerSpec, tape: Tape, category: str = "activations") -> list[Event | Mark]:
    embed(spec, tape, category)
    return list(_literal(tape.cut(), layer0=f"{tape.prefix}hidden"))


def _literal(records: list[Event | Mark], layer0: str = "") -> tuple[Event | Mark, ...]:
    """Outside a repeat a layer's storage is written with its index."""
    out: list[Event | Mark] = []
    for record in records:
        if isinstance(record, Event) and (record.shift or record.tag == layer0 or record.tag == "grad_hidden"):
            record = record._replace(tag=f"{record.tag}#{record.shift}", shift=0)
        out.append(record)
    return tuple(out)


def _residual_bytes(spec: LayerSpec) -> int:
    return spec.hidden * spec.residual_bytes // BF16


def _head_spec(job: Job) -> HeadSpec:
    return HeadSpec(
        tied=job.model.tied_embeddings,
        outputs_cast_to_fp32=job.autocast,
        shifted_logits_copied=not job.stack.at_least("transformers", "4.50"),
        returned_wide=not job.stack.at_least("transformers", "4.46"),
        own_loss=job.model.model_type == "qwen",
    )
