"""The stretches of one micro-batch, in order: embedding, layers, head, reference, loss, backward; events and marks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpofit.memory.answer_head import answer_log_probs
from dpofit.memory.bands import Band
from dpofit.memory.head import (
    LOGITS,
    HeadSpec,
    causal_lm_loss,
    converted,
    embed,
    embed_backward,
    final_states,
    fused_causal_lm_loss,
    log_probs,
    logits,
)
from dpofit.memory.job import Job
from dpofit.memory.layer import decoder_layer
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.memory.program import Event
from dpofit.memory.reward import scores
from dpofit.memory.spec import BF16, LayerSpec
from dpofit.memory.tape import Mark, Storage, Tape, Value
from dpofit.train.longdpo import ALIGNMENT_BYTES, SLAB_BYTES

INT64 = 8
KL = ".kl"  # after an engine's name: its second forward of a KTO step


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


def micro_batch(job: Job) -> list[Part]:
    """Forward, reference, loss and backward of one training micro-batch."""
    spec = job.layer_spec(job.rows, trained=True)
    layers, bands = job.model.layers, job.bands
    batch, made, mask = _inputs(job, spec, "forward", clone=_clones(job))
    parts = [batch, made]
    tape = Tape()
    kept = "checkpoints" if job.recipe.gradient_checkpointing else "activations"
    parts.append(Part("forward", tuple(_embedding(spec, tape, kept))))
    templates = [(band, *_layer_templates(job, spec.in_band(band), mask, band)) for band in bands]
    held = _held_embedding(job, spec)
    forwards = [Part("forward", forward, band.count, first=band.first) for band, forward, _, _ in templates]
    leaving, slab_rest = _leaving(job, spec)
    # without checkpoints on the GPU the embeddings still stay there where they are a leaf that wants a gradient
    leaf_stays = bool(held) and bands[0].checkpointed and "embed_tokens" not in spec.trained
    parts += [*held, *forwards, *([] if leaf_stays else map(_freed, held)), *leaving, *slab_rest]
    casts = [Part("forward", cast, band.count, first=band.first) for band, _, _, cast in templates if cast]
    casts += _captured_ends(forwards)

    hidden = Value(Storage("hidden", _residual_bytes(spec), kept, shift=layers), bands[-1].reached)
    head, result, outputs, waiting = _head_and_loss(job, spec, tape, hidden, "forward", casts)
    kept_by_layers = any(band.checkpointed for band in bands)  # checkpoints keep the layers' arguments
    parts += head if kept_by_layers else [head[0], _freed(made), *head[1:]]
    if job.passes > 1:
        parts += _kl_pass(job, spec, bands, "forward", "policy")
        outputs = _split_by_tag(tape, outputs)
        parts.append(Part("forward", _literal(tape.cut())))
    if job.reference_in_step:
        parts += reference(job)
    tape.drop(outputs)
    loss_grad = tape.new("loss_grad", 512, "activation_grads")
    parts.append(Part("loss", _literal(tape.cut())))

    tape.give(result, loss_grad)
    tape.mark("pre_backward", "root")
    tape.run_backward()
    tape.drop(result.storage)
    if hidden.grad is not None:
        hidden.grad.tag, hidden.grad.shift = "grad_hidden", layers
    parts.append(Part("backward", _literal(tape.cut())))
    reached = [entry for entry in reversed(templates) if entry[0].reached]
    for band, _, backward, _ in reached:
        parts += _backward_layers(job, band, backward)
    tail = Tape()
    lowest = reached[-1][0]
    # accelerate's backward runs the engine's step too, while the caller holds the loss and so what its graph holds
    graph_ends = "backward" if job.recipe.zero is None else "optimizer_step"
    ends = [replace(_freed(part), phase="backward") for part in (batch, *slab_rest)]
    if lowest.input_needs_grad:
        if job.embedding_needs_grad:
            embed_backward(spec, tail, waiting[0] if waiting else None)
        gradient = Storage("grad_hidden", _residual_bytes(spec), "activation_grads", shift=lowest.first)
        if "embed_tokens" in spec.trained:
            tail.drop(gradient)
        else:  # the lowest layer's input is a leaf, kept by its AccumulateGrad node, and so is its gradient
            leaf = None if leaf_stays else tail.new("leaf", _residual_bytes(spec), "checkpoints")
            parts.append(Part("backward", _literal(tail.cut())))
            tail.drop(leaf, gradient)
            ends.append(Part(graph_ends, _literal(tail.cut())))
            ends += [replace(_freed(part), phase=graph_ends) for part in held if leaf_stays]
    parts.append(Part("backward", _literal(tail.cut())))
    if kept_by_layers:
        ends.append(replace(_freed(made), phase=graph_ends))
    return parts + ends


def evaluation(job: Job) -> list[Part]:
    """One evaluation batch: no gradients; the reference too."""
    spec = job.layer_spec(job.eval_rows, trained=True)
    batch, made, mask = _inputs(job, spec, "eval", clone=_clones(job))
    parts = [batch, made]
    tape = Tape("eval.", grad=False)
    layers, casts = _frozen_layers(job, spec, job.bands, tape, "eval", "policy", mask)
    parts += layers
    casts += _captured_ends(layers)
    hidden = Value(Storage("eval.hidden", _residual_bytes(spec), "activations", shift=job.model.layers), False)
    head, result, held, _ = _head_and_loss(job, spec, tape, hidden, "eval", casts)
    parts += [head[0], _freed(made), *head[1:]]
    tape.drop(result.storage)
    if job.passes > 1:
        parts += _kl_pass(job, spec, job.bands, "eval", "policy", "eval.")
        held = _split_by_tag(tape, held)
        parts.append(Part("eval", _literal(tape.cut())))
    if job.reference_in_step:
        parts += reference(job, "eval", job.eval_rows)
    tape.drop(held)
    return [*parts, Part("eval", _literal(tape.cut())), _freed(batch)]


def _head_and_loss(
    job: Job, spec: LayerSpec, tape: Tape, hidden: Value, phase: str, casts: list[Part]
) -> tuple[list[Part], Value, Storage | None, list[Storage]]:
    """Parts, the first up to the decoder's end; the loss or log-probs; what the caller still holds of the outputs; a
    tied head's waiting gradient.

    The model's forward ends, and with it autocast's cache of weights, before DPO's log-probs but after SFT's loss.
    """
    head = _head_spec(job)
    output = held = None
    outside = spec
    decoder: list[Part] = []
    if job.fused_loss and tape.grad:
        result, waiting = fused_causal_lm_loss(spec, tape, hidden, head)
    else:
        outside, states = final_states(spec, tape, hidden, job.collated_tokens(spec.rows))
        decoder = [Part(phase, _literal(tape.cut()))]
        if job.recipe.stage == "rm":
            result, waiting = scores(outside, tape, states, head, job.score_head_bytes), []
        elif job.on("answer_logps"):
            result, waiting = answer_log_probs(outside, tape, states, head, job.answer_tokens(spec.rows))
        else:
            output, waiting = logits(outside, tape, states, head)
        if output is not None and not job.preference:
            result, held = causal_lm_loss(outside, tape, output, head)
        tape.drop(states.storage)
    inside = Part(phase, _literal(tape.cut()))
    if output is not None and job.preference:
        result, held = log_probs(outside, tape, output)
        if spec.shared is not None:  # the metrics get the means of the logits at once
            tape.drop(held)
            held = None
    elif held is not None:
        held = converted(spec, tape, held, head)
    return [*decoder, inside, *casts, Part(phase, _literal(tape.cut()))], result, held, waiting


def reference(job: Job, phase: str = "reference_forward", rows: int | None = None) -> list[Part]:
    """The reference's forward under no_grad: a second model, or the policy with its adapters off."""
    spec = job.layer_spec(rows or job.rows, trained=not job.reference_copy)
    spec = replace(spec, lora_active=False, trained=frozenset())
    engine = "reference" if job.reference_copy else "policy"
    alike = (Band(0, job.model.layers, frozenset(), job.recipe.gradient_checkpointing, False, False),)
    tape = Tape("reference.", grad=False)
    parts, wide = _frozen_forward(job, spec, alike, tape, phase, engine)
    if job.passes > 1:
        parts += _kl_pass(job, spec, alike, phase, engine, "reference.")
        wide = _split_by_tag(tape, wide)
    tape.drop(wide)
    return [*parts, Part(phase, _literal(tape.cut()), engine=engine)]


def _kl_pass(
    job: Job, spec: LayerSpec, bands: tuple[Band, ...], phase: str, engine: str, prefix: str = ""
) -> list[Part]:
    """KTO's forward of the mismatched answers, without gradients (train/kto/trainer.py:187-194)."""
    if job.reference_copy:  # else the forward with adapters off undoes the engine's trace
        engine = f"{engine}{KL}"
    tape = Tape(f"{prefix}kl.", grad=False)
    parts, wide = _frozen_forward(job, spec, bands, tape, phase, engine)
    tape.drop(wide)
    return [*parts, Part(phase, _literal(tape.cut()), engine=engine)]


def _split_by_tag(tape: Tape, wide: Storage | None) -> Storage | None:
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
    batch, made, mask = _inputs(job, spec, phase, clone=_clones(job), prefix=tape.prefix, engine=engine)
    parts = [batch, made]
    layers, casts = _frozen_layers(job, spec, bands, tape, phase, engine, mask)
    parts += layers
    hidden = Value(Storage(f"{tape.prefix}hidden", _residual_bytes(spec), "activations", shift=job.model.layers), False)
    outside, states = final_states(spec, tape, hidden, job.collated_tokens(spec.rows))
    parts += [Part(phase, _literal(tape.cut()), engine=engine), _freed(made)]
    wide: Storage | None = None
    if job.on("answer_logps"):
        result, _ = answer_log_probs(outside, tape, states, _head_spec(job), job.answer_tokens(spec.rows))
        tape.drop(states.storage)
        parts += [Part(phase, _literal(tape.cut()), engine=engine), *casts]
    else:
        output, _ = logits(outside, tape, states, _head_spec(job))
        tape.drop(states.storage)
        parts += [Part(phase, _literal(tape.cut()), engine=engine), *casts]
        result, wide = log_probs(outside, tape, output)
    tape.drop(result.storage)
    parts.append(Part(phase, _literal(tape.cut()), engine=engine))
    return [*parts, _freed(batch)], wide


def _frozen_layers(
    job: Job, spec: LayerSpec, bands: tuple[Band, ...], tape: Tape, phase: str, engine: str, mask: Storage | None
) -> tuple[list[Part], list[Part]]:
    """Embedding and layers without gradients: only the residual passes from layer to layer. Also the ends of each
    layer's copies of weights that autocast keeps to the end of the forward."""
    residual = _residual_bytes(spec)
    held = Part(phase, (Event(f"{tape.prefix}inputs_embeds", residual, "activations"),), engine=engine)
    parts = [Part(phase, tuple(_embedding(spec, tape)), engine=engine), held]
    ends = []
    # a LoRA reference is the policy in training mode: unsloth's forward copies its input to the host all the same
    unsloth = job.recipe.use_unsloth_gc and engine.startswith("policy") and phase != "eval"
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
        _capture(job, layer, x)
        parts.append(Part(phase, tuple(layer.cut()), band.count, engine=engine, first=band.first))
        layer.drop(*layer.weight_casts)
        if end := tuple(layer.cut()):
            ends.append(Part(phase, end, band.count, engine=engine, first=band.first))
    return [*parts, _freed(held)], ends


def _capture(job: Job, tape: Tape, x: Value) -> None:
    """A reward model asks for the hidden states of every layer (output_hidden_states=True): what would go stays."""
    if job.recipe.stage == "rm" and x.storage.holders == 0:
        tape.new("captured", x.storage.size_bytes, "hidden_states")


def _captured_ends(forwards: list[Part]) -> list[Part]:
    """Captured states go when the model's forward has returned."""
    ends = []
    for part in forwards:
        found = [event for event in part.records if isinstance(event, Event) and event.category == "hidden_states"]
        if found:
            ends.append(replace(part, records=tuple(event._replace(size_bytes=-event.size_bytes) for event in found)))
    return ends


def _held_embedding(job: Job, spec: LayerSpec) -> list[Part]:
    """The model's forward holds the embeddings under a name of their own (modeling_qwen2.py inputs_embeds) while its
    layers run; with checkpoints on the GPU they are the first of these anyway."""
    if job.bands[0].checkpointed and not (job.recipe.use_unsloth_gc or job.on("offload_checkpoints")):
        return []
    return [Part("forward", (Event("inputs_embeds", _residual_bytes(spec), "activations"),))]


def _layer_templates(
    job: Job, spec: LayerSpec, mask: Storage | None, band: Band
) -> tuple[tuple[Event | Mark, ...], tuple[Event | Mark, ...], tuple[Event | Mark, ...]]:
    """Forward and backward records of one layer of the band under the job's gradient checkpointing, and the end of the
    weight copies that autocast keeps from the one to the end of the whole forward."""
    residual = _residual_bytes(spec)
    recipe = job.recipe
    offloads = job.on("offload_checkpoints")
    kept = "checkpoints" if recipe.gradient_checkpointing else "activations"
    x = Value(Storage("hidden", residual, kept), band.input_needs_grad)
    gradient = Storage("grad_hidden", residual, "activation_grads", shift=1)
    if not band.checkpointed:
        tape = Tape()
        y = decoder_layer(spec, tape, x, mask)
        y.storage.tag, y.storage.shift, y.storage.category = "hidden", 1, kept
        tape.drop(x.storage)
        _capture(job, tape, x)
        forward = tuple(tape.cut())
        if not band.reached:
            return forward, (), ()
        y.grad = gradient
        tape.run_backward()
        return forward, _finish_backward(tape, x, gradient), ()

    tape = Tape(grad=False)
    tape.weight_casts = []
    block: Storage | None = None
    if recipe.use_unsloth_gc:
        block = tape.new("unsloth_block", pinned_block_bytes(residual), "unsloth_gc", "host_pinned")
    elif offloads:
        block = tape.new("kept_input", kept_bytes(residual), "offload_checkpoints", "host_pinned")
    y = decoder_layer(spec, tape, x, mask)
    y.storage.tag, y.storage.shift, y.storage.category = "hidden", 1, "checkpoints"
    if recipe.use_unsloth_gc or offloads:
        tape.drop(x.storage)
        _capture(job, tape, x)
    forward = tuple(tape.cut())
    tape.drop(*tape.weight_casts)
    casts = tuple(tape.cut())

    tape = Tape("again.", grad=True, recomputes=True)
    if recipe.use_unsloth_gc:
        x = Value(tape.new("hidden_back", residual, "checkpoints"), True)
    elif offloads:  # fetched while the layer above was in work; now the one below is
        x = Value(Storage("hidden_back", residual, "checkpoints"), True)
        ahead = tape.new("hidden_back", residual, "checkpoints")
        ahead.tag, ahead.shift = "hidden_back", -1
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


def _leaving(job: Job, spec: LayerSpec) -> tuple[list[Part], list[Part]]:
    """offload_checkpoints: the input of the last checkpointed layer is still on the device, where backward finds it;
    and what the layers' inputs leave empty of the last slab of host memory."""
    checkpointed = [band for band in job.bands if band.checkpointed]
    if not (job.on("offload_checkpoints") and checkpointed):
        return [], []
    residual, top = _residual_bytes(spec), checkpointed[-1]
    layers = sum(band.count for band in checkpointed)
    rest = -(layers * kept_bytes(residual)) % SLAB_BYTES
    input_of_top = Event(f"hidden_back#{top.first + top.count - 1}", residual, "checkpoints")
    slab_rest = Event("slab_rest", rest, "offload_checkpoints", "host_pinned")
    return [Part("forward", (input_of_top,))], [Part("forward", (slab_rest,) if rest else ())]


def kept_bytes(residual_bytes: int) -> int:
    """Host memory of one layer's input under offload_checkpoints (dpofit.train.longdpo.host_stack)."""
    return -(-residual_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _backward_layers(job: Job, band: Band, backward: tuple[Event | Mark, ...]) -> list[Part]:
    """Backward of a band's layers. Below the lowest checkpointed layer there is no input to fetch ahead."""
    lowest = next((one.first for one in job.bands if one.checkpointed), None)
    if not job.on("offload_checkpoints") or band.first != lowest:
        return [Part("backward", backward, band.count, True, first=band.first)]
    alone = tuple(r for r in backward if not (isinstance(r, Event) and (r.tag, r.shift) == ("hidden_back", -1)))
    upper = [Part("backward", backward, band.count - 1, True, first=band.first + 1)] if band.count > 1 else []
    return [*upper, Part("backward", alone, 1, True, first=band.first)]


def _finish_backward(tape: Tape, x: Value, incoming: Storage) -> tuple[Event | Mark, ...]:
    """Name the gradient of the layer's input, if it has one, for the layer below, and let go of the input."""
    if x.storage.holders:
        tape.drop(x.storage)
    if x.grad is None:
        return tuple(tape.cut())
    if x.grad is incoming:  # the residual stream's gradient was added to in place: the same storage under a new name
        events = tape.cut()
        name = Event(incoming.tag, incoming.size_bytes, incoming.category)
        return (*events, name._replace(size_bytes=-name.size_bytes, shift=1), name)
    x.grad.tag, x.grad.shift = "grad_hidden", 0
    return tuple(tape.cut())


def _inputs(
    job: Job, spec: LayerSpec, phase: str, clone: bool, prefix: str = "", engine: str = "policy"
) -> tuple[Part, Part, Storage | None]:
    """Token ids, attention mask and labels as int64; then what the model makes of them: rotary tables and the bool
    [rows, 1, T, T] mask of sdpa (eager's is bf16)."""
    tape = Tape(prefix + ("eval." if phase == "eval" and not prefix else ""))
    tokens = job.collated_tokens(spec.rows) * job.passes
    if not prefix:
        tape.new("batch", 3 * tokens * INT64, "batch")
    if clone:  # nested_detach(batch, clone=True), dpo/trainer.py:216
        tape.new("batch_clone", 3 * tokens * INT64, "batch")
    batch = Part(phase, _literal(tape.cut()), engine=engine)
    tape.new("rotary", 2 * spec.tokens_per_row * spec.model.head_dim * BF16, "activations")
    mask = None
    if spec.attention in ("efficient", "eager"):
        per_pair = 1 if spec.attention == "efficient" else BF16
        mask = tape.new("mask", spec.rows * spec.tokens_per_row**2 * per_pair, "attention_mask")
    return batch, Part(phase, _literal(tape.cut()), engine=engine), mask


def _clones(job: Job) -> bool:
    """Does concatenated_forward copy its batch? dpo/trainer.py:216; the one of answer_logps does not."""
    return job.has_reference and not job.on("answer_logps")


def _freed(part: Part) -> Part:
    """The end of what a part allocated."""
    events = [record._replace(size_bytes=-record.size_bytes) for record in part.records if isinstance(record, Event)]
    return Part(part.phase, tuple(events), engine=part.engine)


def _embedding(spec: LayerSpec, tape: Tape, category: str = "activations") -> list[Event | Mark]:
    tape.mark("pre", "root")  # modules without parameters of their own: their hooks prefetch
    tape.mark("pre", "model")
    embed(spec, tape, category)
    tape.mark("pre", "rotary_emb")
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
        tied=job.tied_embeddings,
        outputs_cast_to_fp32=job.autocast,
        shifted_logits_copied=not job.stack.at_least("transformers", "4.50"),
        returned_wide=job.recipe.upcast_lmhead_output or not job.stack.at_least("transformers", "4.46"),
        own_loss=job.model.model_type == "qwen",
    )
