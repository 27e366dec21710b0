"""Two shallow traces give the peaks of the deep one, to the byte."""

import pytest

pytestmark = pytest.mark.stack

MODEL = {
    "model_type": "qwen2", "vocab_size": 5000, "hidden_size": 128, "intermediate_size": 384, "layers": 8, "heads": 4,
    "kv_heads": 2, "head_dim": 32, "tied_embeddings": False, "rows": 2, "tokens": 128, "precision": "pure_bf16",
    "steps": 1,
}  # fmt: skip

CASES = {
    "full": {},
    "no checkpointing, autocast": {"checkpointing": "none", "precision": "autocast"},
    "adapters, no logits to speak of": {"finetuning": "lora", "vocab_size": 64},
    "unsloth gc, Liger": {"checkpointing": "unsloth", "liger": True},
    "sft, foreach": {"stage": "sft", "optimizer": "adamw_torch"},
}


@pytest.mark.parametrize("case", CASES)
def test_extrapolated_peaks_equal_the_full_depth_trace(case):
    from dpofit.trace.extrapolate import peaks_of, traced_peaks
    from dpofit.trace.request import TraceRequest
    from dpofit.trace.step import trace_step

    request = TraceRequest(**(MODEL | CASES[case]))
    assert traced_peaks(request) == peaks_of(trace_step(request))
