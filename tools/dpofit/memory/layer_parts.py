"""The decoder layers of a training pass: what each keeps, what leaves for host memory, how its backward runs."""

from __future__ import annotations

from dataclasses import replace

from dpofit.memory.bands import Band
from dpofit.memory.job import Job
from dpofit.memory.layer import decoder_layer
from dpofit.memory.part import Part, residual_bytes
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.memory.program import Event
from dpofit.memory.spec import LayerSpec
from dpofit.memory.tape import Mark, Storage, Tape, Value
from dpofit.train.longdpo import ALIGNMENT_BYTES, SLAB_BYTES


def held_embedding(job: Job, spec: LayerSpec) -> list[Part]:
    """The model's forward holds the embeddings under a name of their own (modeling_qwen2.py inputs_embeds) while its
    layers run; with checkpoints on the GPU they are the first of these anyway."""
    if job.bands[0].checkpointed and not (job.recipe.use_unsloth_gc or job.on("offload_checkpoints")):
        return []
    return [Part("forward", (Event("inputs_embeds", residual_bytes(spec), "activations"),))]


def layer_templates(
    job: Job, spec: LayerSpec, mask: Storage | None, band: Band
) -> tuple[tuple[Event | Mark, ...], tuple[Event | Mark, ...], tuple[Event | Mark, ...]]:
    """Forward and backward records of one layer of the band under the job's gradient checkpointing, and the end of the
    weight copies that autocast keeps from the one to the end of the whole forward."""
    residual = residual_bytes(spec)
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
        capture(job, tape, x)
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
        capture(job, tape, x)
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


def leaving(job: Job, spec: LayerSpec) -> tuple[list[Part], list[Part]]:
    """offload_checkpoints: the input of the last checkpointed layer is still on the device, where backward finds it;
    and what the layers' inputs leave empty of the last slab of host memory."""
    checkpointed = [band for band in job.bands if band.checkpointed]
    if not (job.on("offload_checkpoints") and checkpointed):
        return [], []
    residual, top = residual_bytes(spec), checkpointed[-1]
    layers = sum(band.count for band in checkpointed)
    rest = -(layers * kept_bytes(residual)) % SLAB_BYTES
    input_of_top = Event(f"hidden_back#{top.first + top.count - 1}", residual, "checkpoints")
    slab_rest = Event("slab_rest", rest, "offload_checkpoints", "host_pinned")
    return [Part("forward", (input_of_top,))], [Part("forward", (slab_rest,) if rest else ())]


def kept_bytes(residual_bytes: int) -> int:
    """Host memory of one layer's input under offload_checkpoints (dpofit.train.longdpo.host_stack)."""
    return -(-residual_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def backward_layers(job: Job, band: Band, backward: tuple[Event | Mark, ...]) -> list[Part]:
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


def capture(job: Job, tape: Tape, x: Value) -> None:
    """A reward model asks for the hidden states of every layer (output_hidden_states=True): what would go stays."""
    if job.recipe.stage == "rm" and x.storage.holders == 0:
        tape.new("captured", x.storage.size_bytes, "hidden_states")


def captured_ends(forwards: list[Part]) -> list[Part]:
    """Captured states go when the model's forward has returned."""
    ends = []
    for part in forwards:
        found = [event for event in part.records if isinstance(event, Event) and event.category == "hidden_states"]
        if found:
            ends.append(replace(part, records=tuple(event._replace(size_bytes=-event.size_bytes) for event in found)))
    return ends
