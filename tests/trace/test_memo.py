"""A trace that remembers what operations gave is the trace that asks torch every time."""

from itertools import groupby

import pytest

pytestmark = pytest.mark.stack

MODEL = {
    "model_type": "qwen2", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4,
    "kv_heads": 2, "head_dim": 16, "tied_embeddings": False, "rows": 2, "tokens": 24, "steps": 2,
}  # fmt: skip
CASES = {
    "ZeRO-3, offloaded": {
        "world_size": 2,
        "deepspeed": {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
            }
        },
    },
    "adapters under autocast, foreach": {"finetuning": "lora", "precision": "autocast", "optimizer": "adamw_torch"},
    "sft, eager attention, no checkpointing": {"stage": "sft", "attention": "eager", "checkpointing": "none"},
}


@pytest.mark.parametrize("case", CASES)
def test_every_birth_and_death_is_the_same(case, monkeypatch):
    from dpofit.trace.memo import Memo
    from dpofit.trace.request import TraceRequest
    from dpofit.trace.step import trace_step

    request = TraceRequest(**(MODEL | CASES[case]))
    trace_step(request)  # so that the next one finds everything remembered
    remembered = trace_step(request).recorder
    monkeypatch.setattr(Memo, "call", lambda self, func, args, kwargs: func(*args, **kwargs))
    asked = trace_step(request).recorder
    assert _ordered(remembered.marks) == _ordered(asked.marks)
    assert remembered.storages == asked.storages


def _ordered(marks):
    """Deaths in a row by their number: autocast drops its cached copies in the order of their addresses."""
    runs = [list(run) for _, run in groupby(marks, key=lambda mark: mark.size_bytes < 0)]
    return [sorted(run, key=lambda mark: mark.index) for run in runs]
