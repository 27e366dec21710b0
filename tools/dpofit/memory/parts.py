"""The stretches of one micro-batch, in order: embedding, layers, head, reference, loss, backward."""

from __future__ import annotations

from dataclasses import replace

from dpofit.memory.answer_head import answer_log_probs
from dpofit.memory.frozen_parts import frozen_layers, kl_pass, reference, split_by_tag
from dpofit.memory.head import (
    causal_lm_loss,
    converted,
    embed_backward,
    final_states,
    fused_causal_lm_loss,
    log_probs,
    logits,
)
from dpofit.memory.job import Job
from dpofit.memory.layer_parts import backward_layers, captured_ends, held_embedding, layer_templates, leaving
from dpofit.memory.part import Part, clones, embedding, freed, head_spec, inputs, literal, residual_bytes, wrappers
from dpofit.memory.reward import VALUE_HEAD_MODULES, scores
from dpofit.memory.spec import LayerSpec
from dpofit.memory.tape import BARE, Storage, Tape, Value


def micro_batch(job: Job) -> list[Part]:
    """Forward, reference, loss and backward of one training micro-batch."""
    spec = job.layer_spec(job.rows, trained=True)
    layers, bands = job.model.layers, job.bands
    batch, made, mask = inputs(job, spec, "forward", clone=clones(job))
    parts = [batch, made]
    tape = Tape()
    kept = "checkpoints" if job.recipe.gradient_checkpointing else "activations"
    parts.append(Part("forward", tuple(embedding(spec, tape, kept, wrappers(job)))))
    templates = [(band, *layer_templates(job, spec.in_band(band), mask, band)) for band in bands]
    held = held_embedding(job, spec)
    forwards = [Part("forward", forward, band.count, first=band.first) for band, forward, _, _ in templates]
    leaves, slab_rest = leaving(job, spec)
    # without checkpoints on the GPU the embeddings still stay there where they are a leaf that wants a gradient
    leaf_stays = bool(held) and bands[0].checkpointed and "embed_tokens" not in spec.trained
    parts += [*held, *forwards, *([] if leaf_stays else map(freed, held)), *leaves, *slab_rest]
    casts = [Part("forward", cast, band.count, first=band.first) for band, _, _, cast in templates if cast]
    casts += captured_ends(forwards)

    hidden = Value(Storage("hidden", residual_bytes(spec), kept, shift=layers), bands[-1].reached)
    head, result, outputs, waiting = _head_and_loss(job, spec, tape, hidden, "forward", casts)
    kept_by_layers = any(band.checkpointed for band in bands)  # checkpoints keep the layers' arguments
    parts += head if kept_by_layers else [head[0], freed(made), *head[1:]]
    if job.passes > 1:
        parts += kl_pass(job, spec, bands, "forward", "policy")
        outputs = split_by_tag(tape, outputs)
        parts.append(Part("forward", literal(tape.cut())))
    if job.reference_in_step:
        parts += reference(job)
    tape.drop(outputs)
    loss_grad = tape.new("loss_grad", 512, "activation_grads")
    parts.append(Part("loss", literal(tape.cut())))

    tape.give(result, loss_grad)
    tape.mark("pre_backward", "root")
    for _ in range(wrappers(job) + (VALUE_HEAD_MODULES if job.recipe.stage == "rm" else 0)):
        tape.mark("pre_backward", BARE)
    tape.run_backward()
    tape.drop(result.storage)
    if hidden.grad is not None:
        hidden.grad.tag, hidden.grad.shift = "grad_hidden", layers
    parts.append(Part("backward", literal(tape.cut())))
    reached = [entry for entry in reversed(templates) if entry[0].reached]
    for band, _, backward, _ in reached:
        parts += backward_layers(job, band, backward)
    tail = Tape()
    lowest = reached[-1][0]
    # accelerate's backward runs the engine's step too, while the caller holds the loss and so what its graph holds
    graph_ends = "backward" if job.recipe.zero is None else "optimizer_step"
    ends = [replace(freed(part), phase="backward") for part in (batch, *slab_rest)]
    if lowest.input_needs_grad:
        if job.embedding_needs_grad:
            embed_backward(spec, tail, waiting[0] if waiting else None)
        gradient = Storage("grad_hidden", residual_bytes(spec), "activation_grads", shift=lowest.first)
        if "embed_tokens" in spec.trained:
            tail.drop(gradient)
        else:  # the lowest layer's input is a leaf, kept by its AccumulateGrad node, and so is its gradient
            leaf = None if leaf_stays else tail.new("leaf", residual_bytes(spec), "checkpoints")
            parts.append(Part("backward", literal(tail.cut())))
            tail.drop(leaf, gradient)
            ends.append(Part(graph_ends, literal(tail.cut())))
            ends += [replace(freed(part), phase=graph_ends) for part in held if leaf_stays]
    parts.append(Part("backward", literal(tail.cut())))
    if kept_by_layers:
        ends.append(replace(freed(made), phase=graph_ends))
    return parts + ends


def evaluation(job: Job) -> list[Part]:
    """One evaluation batch: no gradients; the reference too."""
    spec = job.layer_spec(job.eval_rows, trained=True)
    batch, made, mask = inputs(job, spec, "eval", clone=clones(job))
    parts = [batch, made]
    tape = Tape("eval.", grad=False)
    layers, casts = frozen_layers(job, spec, job.bands, tape, "eval", "policy", mask)
    parts += layers
    casts += captured_ends(layers)
    hidden = Value(Storage("eval.hidden", residual_bytes(spec), "activations", shift=job.model.layers), False)
    head, result, held, _ = _head_and_loss(job, spec, tape, hidden, "eval", casts)
    parts += [head[0], freed(made), *head[1:]]
    tape.drop(result.storage)
    if job.passes > 1:
        parts += kl_pass(job, spec, job.bands, "eval", "policy", "eval.")
        held = split_by_tag(tape, held)
        parts.append(Part("eval", literal(tape.cut())))
    if job.reference_in_step:
        parts += reference(job, "eval", job.eval_rows)
    tape.drop(held)
    return [*parts, Part("eval", literal(tape.cut())), freed(batch)]


def _head_and_loss(
    job: Job, spec: LayerSpec, tape: Tape, hidden: Value, phase: str, casts: list[Part]
) -> tuple[list[Part], Value, Storage | None, list[Storage]]:
    """Parts, the first up to the decoder's end; the loss or log-probs; what the caller still holds of the outputs; a
    tied head's waiting gradient.

    The model's forward ends, and with it autocast's cache of weights, before DPO's log-probs but after SFT's loss.
    """
    head = head_spec(job)
    output = held = None
    outside = spec
    decoder: list[Part] = []
    if job.fused_loss and tape.grad:
        result, waiting = fused_causal_lm_loss(spec, tape, hidden, head)
    else:
        outside, states = final_states(spec, tape, hidden, job.collated_tokens(spec.rows))
        decoder = [Part(phase, literal(tape.cut()))]
        if job.recipe.stage == "rm":
            result, waiting = scores(outside, tape, states, head, job.score_head_bytes), []
        elif job.on("answer_logps"):
            result, waiting = answer_log_probs(outside, tape, states, head, job.answer_tokens(spec.rows))
        else:
            output, waiting = logits(outside, tape, states, head)
        if output is not None and not job.preference:
            result, held = causal_lm_loss(outside, tape, output, head)
        tape.drop(states.storage)
    inside = Part(phase, literal(tape.cut()))
    if output is not None and job.preference:
        result, held = log_probs(outside, tape, output)
        if spec.shared is not None:  # the metrics get the means of the logits at once
            tape.drop(held)
            held = None
    elif held is not None:
        held = converted(spec, tape, held, head)
    return [*decoder, inside, *casts, Part(phase, literal(tape.cut()))], result, held, waiting
