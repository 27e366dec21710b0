"""`shared_prompt` on the tape: attention over a shared row in two calls, and the two rows made of its last states.

Models dpofit.train.longdpo.shared_attention and shared_row; the kernels are flash attention's, as in attention.py.
Sizes are bytes.
"""

from __future__ import annotations

from dpofit.memory.spec import BF16, FP32, LayerSpec, SharedRow
from dpofit.memory.tape import Storage, Tape, Value


def shared_attention(spec: LayerSpec, tape: Tape, row: SharedRow, q: Value, k: Value, v: Value) -> Value:
    """Prompt and chosen causal; the rejected answer's queries against copies of the prompt's and their own keys and
    values; the outputs joined."""
    copies = [
        tape.new(f"attention.second_{name}", x.storage.size_bytes // row.tokens * row.second, "activations")
        for name, x in (("k", k), ("v", v))
    ]
    first, second = row.first, row.rejected
    outs = []
    for name, queries in (("first", first), ("second", second)):
        outs.append(tape.new(f"attention.out_{name}", spec.query // row.tokens * queries, "activations"))
        outs.append(tape.new(f"attention.lse_{name}", queries * spec.model.heads * FP32, "activations"))
    joined = Value(tape.new("attention.out", spec.query, "activations"), any(value.needs_grad for value in (q, k, v)))

    def backward(grad: Storage) -> None:
        keys = spec.key // row.tokens
        late = _kernel_backward(spec, tape, "second", second, row.second)
        early = _kernel_backward(spec, tape, "first", first, row.first)
        for value, name, index in ((v, "v", 2), (k, "k", 1)):
            blank = tape.new(f"attention.d{name}_blank", keys * row.chosen, "workspace")
            spread = tape.new(f"attention.d{name}_second", spec.key, "activation_grads")  # split's backward joins
            tape.drop(late[index], blank)
            tape.give(value, spread)
        for value, name, index in ((v, "v", 2), (k, "k", 1)):  # narrow's backward: zeros of the whole, then a copy
            spread = tape.new(f"attention.d{name}_first", spec.key, "activation_grads")
            tape.drop(early[index])
            tape.give(value, spread)
        whole = tape.new("attention.dq", spec.query, "activation_grads")
        tape.drop(early[0], late[0])
        tape.give(q, whole)

    tape.node(joined, [q.storage, k.storage, v.storage, *copies, *outs], backward)
    tape.drop(*copies, *outs, q.storage, k.storage, v.storage)
    return joined


def _kernel_backward(spec: LayerSpec, tape: Tape, name: str, queries: int, keys: int) -> list[Storage]:
    """flash-attn 2 mha_bwd (flash_api.cpp): dq, dk, dv; fp32 dq accumulator, and dk, dv per head when grouped."""
    model = spec.model
    head = model.heads * model.head_dim * BF16
    group = model.kv_heads * model.head_dim * BF16
    grads = [
        tape.new(f"attention.d{which}_{name}_call", size, "activation_grads")
        for which, size in (("q", queries * head), ("k", keys * group), ("v", keys * group))
    ]
    rounded = -(-queries // 128) * 128
    softmax_d = tape.new(f"attention.softmax_d_{name}", rounded * model.heads * FP32, "workspace")
    dq_accum = tape.new(f"attention.dq_accum_{name}", rounded * head * 2, "workspace")
    expanded = tape.new(f"attention.dkv_expanded_{name}", 2 * keys * head if group != head else 0, "workspace")
    tape.drop(softmax_d, dq_accum, expanded)
    return grads


def two_rows(spec: LayerSpec, tape: Tape, row: SharedRow, states: Value, tokens: int) -> Value:
    """The states [1, p + c + r] as the two padded rows, `tokens` in all, that stock has; lets go of `states`."""
    share = states.storage.size_bytes // row.tokens
    parted = Value(tape.new("states.two_rows", share * tokens, "activations"), states.needs_grad)

    def backward(grad: Storage) -> None:
        twice = tape.new("states.grad_prompt", share * row.prompt, "activation_grads")  # two views added up
        joined = tape.new("states.grad_joined", share * row.tokens, "activation_grads")
        tape.drop(twice)
        selected = tape.new("states.grad_selected", share * row.tokens, "activation_grads")
        tape.drop(joined)
        tape.give(states, selected)

    tape.node(parted, [], backward)
    tape.drop(states.storage)
    return parted
