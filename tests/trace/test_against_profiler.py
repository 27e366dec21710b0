"""The same tiny step for real on the CPU, under torch's own memory profiler, needs what the trace says it needs."""

import gc

import pytest

pytestmark = pytest.mark.stack

STEP = {
    "model_type": "qwen2", "vocab_size": 3000, "hidden_size": 128, "intermediate_size": 384, "layers": 3, "heads": 4,
    "kv_heads": 2, "head_dim": 32, "tied_embeddings": False, "rows": 4, "tokens": 256, "attention": "eager",
    "precision": "pure_bf16", "optimizer": "", "cuda": False,
}  # fmt: skip

CASES = {
    "dpo": {},
    "no checkpointing": {"checkpointing": "none"},
    "orpo, llama": {"pref_loss": "orpo", "model_type": "llama"},
    "sft": {"stage": "sft"},
    "adapters under autocast": {"finetuning": "lora", "precision": "autocast"},
    "full under autocast": {"precision": "autocast"},
    "qwen3, tied": {"model_type": "qwen3", "tied_embeddings": True},
    "sdpa kernels of the CPU": {"attention": "sdpa", "padding": False},
}


def _request(case):
    from dpofit.trace.request import TraceRequest

    return TraceRequest(**(STEP | CASES[case]))


def _profiled_peak_bytes(request):
    """Highest sum of allocations and frees the profiler saw during one step, above what lived before it."""
    from torch.profiler import ProfilerActivity, profile

    from dpofit.trace.step import build_models, make_trainer, run_step
    from dpofit.trace.storages import Recorder

    trainer, optimizer = make_trainer(request, *build_models(request, None))
    gc.collect()  # what earlier steps left, profiled too, would be counted as freed by this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_step(request, trainer, optimizer, Recorder())
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _traced_peak_bytes(request):
    from dpofit.trace.step import trace_step

    recorder = trace_step(request).recorder
    weights = sum(s.size_bytes for s in recorder.storages if s.category.endswith("weights") and s.step == 0)
    return recorder.peak(step=1)[0] - weights


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_real_step_is_within_one_percent(case):
    request = _request(case)
    assert _traced_peak_bytes(request) == pytest.approx(_profiled_peak_bytes(request), rel=0.01)
