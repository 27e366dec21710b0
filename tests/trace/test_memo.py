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


@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_are_reduced_as_deepspeed_does_but_for_a_view_a_rank(rank, monkeypatch):
    """Parameters that four ranks don't divide evenly: the last one's part is short."""
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    from dpofit.trace import zero
    from dpofit.trace.request import TraceRequest
    from dpofit.trace.step import trace_step

    uneven = {"vocab_size": 499, "hidden_size": 37, "rank": rank, "world_size": 4}
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 9000}}
    request = TraceRequest(**(MODEL | uneven), deepspeed=config, attention="eager")
    ours = trace_step(request).recorder
    monkeypatch.setattr(zero, "_reduce_scatter_coalesced", reduce_scatter_coalesced)
    theirs = trace_step(request).recorder
    assert [mark.size_bytes for mark in _ordered(ours.marks)] == [mark.size_bytes for mark in _ordered(theirs.marks)]


def _ordered(marks):
    """Deaths in a row by their number: autocast drops its cached copies in the order of their addresses."""
    runs = [list(run) for _, run in groupby(marks, key=lambda mark: mark.size_bytes < 0)]
    return [mark for run in runs for mark in sorted(run, key=lambda mark: mark.index)]
