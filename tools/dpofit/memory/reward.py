"""The reward model's head on the tape: a score for each token, and logits that nobody reads.

Sources: trl 0.24.0 models/modeling_value_head.py (ValueHead, AutoModelForCausalLMWithValueHead.forward);
llamafactory 0.9.5 train/rm/trainer.py compute_loss.
"""

from __future__ import annotations

from dpofit.memory.head import LOGITS, HeadSpec, logits
from dpofit.memory.spec import BF16, FP32, LayerSpec
from dpofit.memory.tape import BARE, Storage, Tape, Value

VALUE_HEAD_MODULES = 3  # v_head, its dropout, its linear, which is small enough to stay gathered


def scores(spec: LayerSpec, tape: Tape, states: Value, head: HeadSpec, head_bytes: int) -> Value:
    """The scores' graph value. `head_bytes`: of an element of the score's own weight. Dropout only in training."""
    elements = spec.tokens * spec.model.hidden_size
    unread, casts = _unread_logits(spec, tape, states, head)
    for _ in range(VALUE_HEAD_MODULES):
        tape.mark("pre", BARE)
    source, mask = tape.hold(states.storage), None
    if tape.grad:
        mask = tape.new("scores.mask", elements, "activations")
        source = _rebound(tape, source, tape.new("scores.dropout", source.size_bytes, "activations"))
    if source.size_bytes < elements * head_bytes:
        source = _rebound(tape, source, tape.new("scores.fp32", elements * FP32, "activations"))
    if spec.autocast and source.size_bytes == elements * FP32:
        source = _rebound(tape, source, tape.new("scores.cast", elements * BF16, "activations"))
    result = Value(tape.new("scores", spec.tokens * FP32, "activations"), True)
    computed_bytes = source.size_bytes

    def backward(grad: Storage) -> None:
        back = tape.new("scores.grad", computed_bytes, "activation_grads")
        if spec.autocast:
            back = _rebound(tape, back, tape.new("scores.grad_fp32", elements * FP32, "activation_grads"))
        if back.size_bytes != states.storage.size_bytes:
            back = _rebound(tape, back, tape.new("scores.grad_bf16", elements * BF16, "activation_grads"))
        back = _rebound(tape, back, tape.new("scores.grad_dropout", back.size_bytes, "activation_grads"))
        tape.give(states, back)

    tape.node(result, [source, mask] if mask else [source], backward)
    tape.drop(source, mask)
    wide = tape.new("logits.fp32", spec.tokens * spec.model.vocab_size * FP32, LOGITS)
    tape.drop(unread, wide, *casts)
    return result


def _unread_logits(spec: LayerSpec, tape: Tape, states: Value, head: HeadSpec) -> tuple[Storage, list[Storage]]:
    """The head's output, which gets no gradient, and autocast's copy of the head to the end of the forward."""
    before, tape.grad, tape.weight_casts = tape.grad, False, []
    output, _ = logits(spec, tape, states, head)
    casts, tape.grad, tape.weight_casts = tape.weight_casts, before, None
    return output.storage, casts


def _rebound(tape: Tape, old: Storage, new: Storage) -> Storage:
    tape.drop(old)
    return new
