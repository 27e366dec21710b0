"""Gemma 2's soft cap on the tape: `tanh(x / cap) * cap`, of attention scores and of logits.

Source: transformers 5.5.4 models/gemma2/modeling_gemma2.py. Sizes are bytes.
"""

from __future__ import annotations

from dpofit.memory.tape import Storage, Tape


def capped(tape: Tape, x: Storage, category: str) -> tuple[Storage, Storage]:
    """(the capped values, tanh's result), held; lets go of `x`."""
    divided = tape.new("softcap.divided", x.size_bytes, category)
    tape.drop(x)
    tanh = tape.new("softcap.tanh", x.size_bytes, category)
    tape.drop(divided)
    return tape.new("softcap.out", x.size_bytes, category), tanh


def capped_backward(tape: Tape, grad: Storage, tanh: Storage, category: str) -> Storage:
    """The gradient of what was capped; lets go of `grad` and of `tanh`, which autograd saved."""
    multiplied = tape.new("softcap.grad_out", grad.size_bytes, category)
    tape.drop(grad)
    through = tape.new("softcap.grad_tanh", grad.size_bytes, category)
    tape.drop(multiplied, tanh)
    divided = tape.new("softcap.grad_divided", grad.size_bytes, category)
    tape.drop(through)
    return divided
