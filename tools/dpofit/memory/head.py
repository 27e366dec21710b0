"""Embedding, final norm, output head and loss on the tape: the tensors as wide as the vocabulary.

Sources: llamafactory 0.9.5 train/dpo/trainer.py:214-292 (concatenated_forward, compute_reference_log_probs,
get_batch_loss_metrics), train/trainer_utils.py:592-636 (get_batch_logps); transformers 5.5.4 loss/loss_utils.py;
ATen/native/cuda/SoftMax.cu. `n` below is rows x tokens x vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpofit.memory.ops import Ops
from dpofit.memory.shared import two_rows
from dpofit.memory.softcap import capped, capped_backward
from dpofit.memory.spec import BF16, FP32, LayerSpec
from dpofit.memory.tape import OUTERMOST, WRAPPER, Storage, Tape, Value
from dpofit.models.shape import Linear

# Pass "logits" as category so that the breakdown shows what the vocabulary costs.
LOGITS = "logits"
LOGITS_GRADIENT = "logits.grad_bf16"  # of what the model returns


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What differs between stacks and wrappers around the head."""

    tied: bool
    outputs_cast_to_fp32: bool  # accelerate's convert_outputs_to_fp32 around an autocast forward (no DeepSpeed)
    shifted_logits_copied: bool  # causal-LM loss before transformers 4.50: shift_logits.contiguous() in fp32
    returned_wide: bool = False  # fp32 logits leave the model, the bf16 ones go: transformers < 4.46, or asked for
    own_loss: bool = False  # Qwen 1's modeling_qwen.py: shift_logits.contiguous() and cross-entropy in the logits' bf16


def embed(spec: LayerSpec, tape: Tape, category: str) -> Value:
    """Token embeddings `[rows, tokens, hidden]`, the first residual and the first layer's checkpoint."""
    size_bytes = spec.hidden * spec.residual_bytes // BF16
    tape.mark("pre", "embed_tokens")
    # Gemma's by their scale, unsloth's by the padding mask (2026.10.9 models/llama.py:1416-1429)
    unscaled = tape.new("embeddings", size_bytes, "activations") if spec.model.family.gemma or spec.unsloth else None
    value = Value(tape.new("hidden", size_bytes, category), True)
    tape.drop(unscaled)
    tape.mark("post", "embed_tokens")
    return value


def embed_backward(spec: LayerSpec, tape: Tape, tied_gradient: Storage | None) -> None:
    """embedding_dense_backward: a gradient of the whole table; a tied head's waits in the engine to be added. A frozen
    table's hook fires too: gradient checkpointing makes its output require a gradient. The module's backward never
    ends for the hooks, since token ids have no gradient."""
    tape.mark("pre_backward", "embed_tokens")
    if "embed_tokens" in spec.trained:
        unscaled = spec.hidden * spec.residual_bytes // BF16 if spec.model.family.gemma else 0
        scaled = tape.new("grad_embeddings", unscaled, "activation_grads")
        Ops(spec, tape).weight_gradient("embed_tokens", spec.model.embedding_parameters, computed_wide=True)
        tape.drop(tied_gradient, scaled)


def final_states(spec: LayerSpec, tape: Tape, hidden: Value, collated_tokens: int) -> tuple[LayerSpec, Value]:
    """The states that the head sees, held, and their shape: after the final norm, and under shared_prompt as the rows
    of the batch, `collated_tokens` in all. Lets go of `hidden`, whose name the norm's output takes over."""
    ops = Ops(spec, tape)
    normed = ops.boundary(ops.rms_norm(hidden, "norm", spec.model.hidden_size, spec.tokens), "model")
    tape.drop(hidden.storage)
    if spec.shared is None:
        return spec, normed
    rows = 2 * spec.rows
    outside = replace(spec, rows=rows, tokens_per_row=collated_tokens // rows, shared=None)
    return outside, two_rows(spec, tape, spec.shared, normed, collated_tokens)


def logits(spec: LayerSpec, tape: Tape, normed: Value, head: HeadSpec) -> tuple[Value, list[Storage]]:
    """The output head. Returns bf16 logits (held), and a list that backward fills with a tied head's waiting
    gradient."""
    model = spec.model
    waiting: list[Storage] = []
    if not head.tied:
        linear = Linear("lm_head", model.hidden_size, model.vocab_size, bias=False)
        output = Ops(spec, tape).base_linear(normed, linear)
    else:
        output = _tied_head(spec, tape, normed, waiting)
    output.storage.category = LOGITS
    return _capped(tape, output) if model.logit_softcap is not None else output, waiting


def _capped(tape: Tape, output: Value) -> Value:
    """Gemma 2's final_logit_softcapping, in bf16."""
    storage, tanh = capped(tape, output.storage, LOGITS)
    result = Value(storage, output.needs_grad)

    def backward(grad: Storage) -> None:
        tape.give(output, capped_backward(tape, tape.hold(grad), tanh, LOGITS))

    tape.node(result, [], backward)
    if not (tape.grad and output.needs_grad):
        tape.drop(tanh)  # else where backward lets go of it
    return result


def _tied_head(spec: LayerSpec, tape: Tape, normed: Value, waiting: list[Storage]) -> Value:
    """The head shares the embedding's weight: its gradient stays in the engine until the embedding's comes."""

    def wait(gradient: Storage) -> None:
        gradient.tag = "tied_grad"
        waiting.append(gradient)

    table = Linear("embed_tokens", spec.model.hidden_size, spec.model.vocab_size, bias=False)
    return Ops(spec, tape).base_linear(normed, table, wait)


def log_probs(spec: LayerSpec, tape: Tape, output: Value) -> tuple[Value, Storage]:
    """`.logits.to(float32)`, then log_softmax of logits[:, :-1] and gather. Several rows' slice is not contiguous, so
    CUDA's host_softmax first copies it. Returns the log-probs' graph value (no bytes of note) and the fp32 logits,
    held."""
    vocab = spec.model.vocab_size
    full = spec.tokens * vocab * FP32
    shifted = spec.rows * (spec.tokens_per_row - 1) * vocab * FP32
    wide = Value(tape.new("logits.fp32", full, LOGITS), output.needs_grad)

    def cast_backward(grad: Storage) -> None:
        tape.give(output, tape.new(LOGITS_GRADIENT, full // 2, LOGITS))

    tape.node(wide, [], cast_backward)
    tape.drop(output.storage)
    contiguous = tape.new("logits.contiguous", shifted if spec.rows > 1 else 0, LOGITS)
    log_softmax = tape.new("logits.log_softmax", shifted, LOGITS)
    tape.drop(contiguous)
    result = Value(tape.new("log_probs", spec.tokens * FP32, "activations"), output.needs_grad)

    def backward(grad: Storage) -> None:
        gathered = tape.new("logits.grad_gather", shifted, LOGITS)
        softmax_grad = tape.new("logits.grad_log_softmax", shifted, LOGITS)
        tape.drop(gathered, log_softmax)
        sliced = tape.new("logits.grad_slice", full, LOGITS)
        tape.drop(softmax_grad)
        tape.give(wide, sliced)

    if tape.grad and output.needs_grad:
        tape.node(result, [], backward)  # log_softmax is dropped inside, where LogSoftmaxBackward lets go of it
    else:
        tape.drop(log_softmax)
    return result, wide.storage


def causal_lm_loss(spec: LayerSpec, tape: Tape, output: Value, head: HeadSpec) -> tuple[Value, Storage]:
    """ForCausalLMLoss: fp32 logits, cross-entropy over all positions. Returns the loss and the logits that the
    model's output object holds."""
    if head.own_loss:
        return _own_causal_lm_loss(spec, tape, output)
    vocab = spec.model.vocab_size
    full = spec.tokens * vocab * FP32
    wide = Value(tape.new("logits.fp32", full, LOGITS), output.needs_grad)
    loss = Value(tape.new("loss", 512, "activations"), output.needs_grad)

    def cast_backward(grad: Storage) -> None:
        tape.give(output, tape.new(LOGITS_GRADIENT, full // 2, LOGITS))

    tape.node(wide, [], cast_backward)
    returned = output.storage
    if head.returned_wide:
        tape.drop(returned)
        returned = tape.hold(wide.storage)
    source = wide.storage
    shifted = None
    if head.shifted_logits_copied and spec.rows > 1:  # one row's slice is contiguous already
        shifted = source = tape.new("logits.shifted", spec.rows * (spec.tokens_per_row - 1) * vocab * FP32, LOGITS)
    log_softmax = tape.new("logits.log_softmax", source.size_bytes, LOGITS)

    def backward(grad: Storage) -> None:
        nll = tape.new("logits.grad_nll", log_softmax.size_bytes, LOGITS)
        softmax_grad = tape.new("logits.grad_log_softmax", log_softmax.size_bytes, LOGITS)
        tape.drop(nll, log_softmax)
        if head.shifted_logits_copied:
            sliced = tape.new("logits.grad_slice", full, LOGITS)
            tape.drop(softmax_grad)
            softmax_grad = sliced
        tape.give(wide, softmax_grad)

    if tape.grad and output.needs_grad:
        tape.node(loss, [], backward)
    else:
        tape.drop(log_softmax)
    tape.drop(wide.storage, shifted)
    return loss, returned


def _own_causal_lm_loss(spec: LayerSpec, tape: Tape, output: Value) -> tuple[Value, Storage]:
    """Qwen 1: a contiguous copy of several rows' shifted bf16 logits; autocast then takes cross-entropy to fp32."""
    shifted_bytes = spec.rows * (spec.tokens_per_row - 1) * spec.model.vocab_size * BF16
    wider = 2 if spec.autocast else 1
    loss = Value(tape.new("loss", 512, "activations"), output.needs_grad)
    shifted = tape.new("logits.shifted", shifted_bytes if spec.rows > 1 else 0, LOGITS)
    cast = tape.new("logits.fp32", shifted_bytes * 2, LOGITS) if spec.autocast else None
    log_softmax = tape.new("logits.log_softmax", shifted_bytes * wider, LOGITS)
    tape.drop(cast)

    def backward(grad: Storage) -> None:
        nll = tape.new("logits.grad_nll", log_softmax.size_bytes, LOGITS)
        softmax_grad = tape.new("logits.grad_log_softmax", log_softmax.size_bytes, LOGITS)
        tape.drop(nll, log_softmax)
        if spec.autocast:
            narrow = tape.new(LOGITS_GRADIENT, shifted_bytes, LOGITS)
            tape.drop(softmax_grad)
            softmax_grad = narrow
        sliced = tape.new("logits.grad_slice", spec.tokens * spec.model.vocab_size * BF16, LOGITS)
        tape.drop(softmax_grad)
        tape.give(output, sliced)

    if tape.grad and output.needs_grad:
        tape.node(loss, [], backward)
    else:
        tape.drop(log_softmax)
    tape.drop(shifted)
    return loss, output.storage


def converted(spec: LayerSpec, tape: Tape, output: Storage, head: HeadSpec) -> Storage:
    """The logits in the output object that compute_loss still holds; fp32 when accelerate converts outputs."""
    if not head.outputs_cast_to_fp32 or head.returned_wide:
        return output
    wide = tape.new("logits.converted", spec.tokens * spec.model.vocab_size * FP32, LOGITS)
    tape.drop(output)
    return wide


def fused_causal_lm_loss(spec: LayerSpec, tape: Tape, hidden: Value, head: HeadSpec) -> tuple[Value, list[Storage]]:
    """Liger's fused linear cross-entropy (liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py): logits in chunks of
    next_pow2(ceil(tokens / ceil(V / h))) rows; the gradients of hidden states and head are made in the forward.
    Returns the loss and a tied head's waiting gradient."""
    ops, model = Ops(spec, tape), spec.model
    normed = ops.rms_norm(hidden, "norm", model.hidden_size, spec.tokens)
    tape.drop(hidden.storage)
    name = "embed_tokens" if head.tied else "lm_head"
    if head.tied:  # else the whole model's hooks fetch the weight: see step.py _parameters
        tape.mark("pre", name)
    increase = -(-model.vocab_size // model.hidden_size)
    chunk_rows = min(1 << (-(-spec.tokens // increase) - 1).bit_length(), spec.tokens)
    in_place = model.family.liger_norms_in_place  # Liger's RMSNorm writes the last layer's gradient over it
    grad_input = tape.new("grad_hidden" if in_place else "grad_states", normed.storage.size_bytes, "activation_grads")
    grad_input.shift = model.layers if in_place else 0
    weight_bytes = FP32 if spec.autocast else BF16
    grad_weight: Storage | None = None
    if name in spec.trained and tape.grad:
        grad_weight = tape.new("tied_grad", model.embedding_parameters * weight_bytes, "gradients")
        if not head.tied:
            grad_weight.tag = f"grad.{name}"
    # under autocast `grad_logits @ weight` caches a bf16 head; each chunk's `x @ weight.t()`, a view, makes another
    cast_bytes = model.embedding_parameters * BF16 if spec.wide(name) else 0
    weight_cast = tape.new("lm_head.weight_cast", cast_bytes, "autocast_cache")
    view_cast = tape.new("lm_head.weight_view_cast", cast_bytes, "autocast_cache")
    tape.temporary("logits.chunk", chunk_rows * model.vocab_size * BF16, LOGITS)
    tape.drop(view_cast)
    loss = Value(tape.new("loss", 512, "activations"), True)
    tape.mark("post", name if head.tied else OUTERMOST if spec.lora is None else WRAPPER)

    def backward(grad: Storage) -> None:
        if head.tied:
            tape.mark("pre_backward", name)
        if grad_weight is not None and not head.tied:
            tape.mark("grad", name, model.embedding_parameters, grad_weight.size_bytes)
        tape.give(normed, tape.hold(grad_input))
        if head.tied:
            tape.mark("post_backward", name)

    tape.node(loss, [grad_input], backward)
    tape.drop(grad_input, normed.storage, weight_cast)
    return loss, [grad_weight] if grad_weight is not None and head.tied else []
