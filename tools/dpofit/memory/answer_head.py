"""The output head under `answer_logps` on the tape: chunks of answer positions forward, slices of the vocabulary back.

Models dpofit.train.longdpo.answer_logps and answer_head. `n` below is the positions that predict a label.
"""

from __future__ import annotations

from dpofit.memory.head import LOGITS, HeadSpec
from dpofit.memory.spec import BF16, FP32, LayerSpec
from dpofit.memory.tape import Storage, Tape, Value
from dpofit.train.longdpo import CHUNK_POSITIONS


def answer_log_probs(
    spec: LayerSpec, tape: Tape, normed: Value, head: HeadSpec, answers: int
) -> tuple[Value, list[Storage]]:
    """States of the n = `answers` positions, head, log-softmax and gather. Returns the log-probs, and a list that
    backward fills with a tied head's waiting gradient."""
    share = normed.storage.size_bytes // spec.tokens
    picked = Value(tape.new("answer_states", answers * share, "activations"), normed.needs_grad)

    def spread(grad: Storage) -> None:  # index_select's backward: zeros of the whole, then index_add_
        tape.give(normed, tape.new("answer_states.grad", normed.storage.size_bytes, "activation_grads"))

    tape.node(picked, [], spread)
    name = "embed_tokens" if head.tied else "lm_head"
    waiting: list[Storage] = []
    result = _head(spec, tape, picked, name, answers, waiting, head.tied)
    tape.drop(picked.storage)
    return result, waiting


def _head(spec: LayerSpec, tape: Tape, x: Value, name: str, answers: int, waiting: list[Storage], tied: bool) -> Value:
    """AnswerHead.forward and _TargetLogps."""
    model = spec.model
    elements, width = model.embedding_parameters, model.hidden_size
    trained = name in spec.trained
    tape.mark("pre", name)
    cast = None
    if x.storage.size_bytes == answers * width * FP32:  # custom functions see no autocast: both are cast by hand
        cast = tape.new("answer_states.cast", answers * width * BF16, "activations")
    weight_cast = tape.new(f"{name}.weight_cast", elements * BF16, "autocast_cache") if spec.wide(name) else None
    logps = Value(tape.new("log_probs", answers * FP32, "activations"), x.needs_grad or trained)
    log_sums = tape.new("log_sums", answers * FP32, "activations")
    _chunks(tape, answers, model.vocab_size)

    def backward(grad: Storage) -> None:
        tape.mark("pre_backward", name)
        grad_x = (
            tape.new("answer_states.grad_fp32", answers * width * FP32, "activation_grads") if x.needs_grad else None
        )
        grad_weight = tape.new(f"{name}.grad_bf16", elements * BF16, "gradients") if trained else None
        _slices(tape, answers, model.vocab_size, width, x.needs_grad)
        narrow = None
        if grad_x is not None:
            narrow = tape.new("answer_states.grad_bf16", answers * width * BF16, "activation_grads")
            tape.drop(grad_x)
        if grad_weight is not None:
            _hand_over(spec, tape, name, grad_weight, waiting if tied else None)
        if narrow is not None:
            if cast is not None:
                wide = tape.new("answer_states.grad_wide", x.storage.size_bytes, "activation_grads")
                tape.drop(narrow)
                narrow = wide
            tape.give(x, narrow)
        tape.mark("post_backward", name)

    saved = [cast or x.storage, log_sums] + ([weight_cast] if weight_cast is not None else [])
    tape.node(logps, saved, backward)
    tape.drop(cast, weight_cast, log_sums)
    tape.mark("post", name)
    return logps


def _chunks(tape: Tape, answers: int, vocabulary: int) -> None:
    """The first chunk, whose size no other exceeds: bf16 logits, their fp32 copy, its log-softmax (_score)."""
    entries = min(CHUNK_POSITIONS, answers) * vocabulary
    low = tape.new("logits.chunk", entries * BF16, LOGITS)
    wide = tape.new("logits.chunk_fp32", entries * FP32, LOGITS)
    tape.drop(low)
    tape.temporary("logits.chunk_log_softmax", entries * FP32, LOGITS)
    tape.drop(wide)


def _slices(tape: Tape, answers: int, vocabulary: int, hidden_size: int, for_states: bool) -> None:
    """The first slice: bf16 logits, the fp32 copy that becomes its gradient in place, that in bf16 (_slope), and its
    product with the slice, fp32 (_product)."""
    entries = answers * max(1, min(vocabulary, CHUNK_POSITIONS * vocabulary // max(1, answers)))
    low = tape.new("logits.slice", entries * BF16, LOGITS)
    wide = tape.new("logits.slice_fp32", entries * FP32, LOGITS)
    tape.drop(low)
    slope = tape.new("logits.slice_grad", entries * BF16, LOGITS)
    tape.drop(wide)
    if for_states:
        tape.temporary("answer_states.product", answers * hidden_size * FP32)
    tape.drop(slope)


def _hand_over(spec: LayerSpec, tape: Tape, name: str, gradient: Storage, waiting: list[Storage] | None) -> None:
    """The weight's gradient, in the weight's dtype, to its reader, or to wait for the embedding's when tied."""
    elements = spec.model.embedding_parameters
    if spec.wide(name):
        wide = tape.new(f"{name}.grad_fp32", elements * FP32, "gradients")
        tape.drop(gradient)
        gradient = wide
    if waiting is not None:
        waiting.append(gradient)
        return
    gradient.tag = f"grad.{name}"
    tape.mark("grad", name, elements, gradient.size_bytes)
