"""Two shallow traces give the deep one, to the byte: in every phase of both steps, on the card and in host memory."""

import os

import pytest

pytestmark = pytest.mark.stack
ALL = bool(os.environ.get("DPOFIT_TEST_ALL"))

MODEL = {
    "model_type": "qwen2", "vocab_size": 5000, "hidden_size": 128, "intermediate_size": 384, "layers": 8, "heads": 4,
    "kv_heads": 2, "head_dim": 32, "tied_embeddings": False, "rows": 2, "tokens": 128, "precision": "pure_bf16",
    "steps": 2,
}  # fmt: skip
OFFLOAD = {"device": "cpu", "pin_memory": True}


def _zero3(**keys):
    """Twelve layers on four ranks; a layer is 200,000 parameters, so several are let go of before the next use."""
    zero = {
        "stage": 3, "stage3_prefetch_bucket_size": 9000, "stage3_param_persistence_threshold": 100,
        "stage3_max_live_parameters": 300_000, "stage3_max_reuse_distance": 200_000, "reduce_bucket_size": 16384,
    } | keys  # fmt: skip
    return {"precision": "deepspeed", "layers": 12, "world_size": 4, "deepspeed": {"zero_optimization": zero}}


CASES = {
    "full": {},
    "no checkpointing, autocast": {"checkpointing": "none", "precision": "autocast"},
    "adapters, no logits to speak of": {"finetuning": "lora", "vocab_size": 64},
    "unsloth gc, Liger": {"checkpointing": "unsloth", "liger": True},
    "sft, foreach": {"stage": "sft", "optimizer": "adamw_torch"},
    "freeze tuning, the last layer": {"finetuning": "freeze", "freeze_layers": 1, "layers": 10},
    "ZeRO-3": _zero3(),
    "ZeRO-3, adapters": _zero3(reduce_bucket_size=500) | {"finetuning": "lora"},
}
if ALL:
    CASES |= {
        "ZeRO-3, offloaded": _zero3(
            offload_optimizer=OFFLOAD,
            offload_param=OFFLOAD,
            stage3_prefetch_bucket_size="auto",
            stage3_param_persistence_threshold="auto",
        ),
        "ZeRO-3, adapters that never fill the bucket": _zero3(reduce_bucket_size=300_000) | {"finetuning": "lora"},
    }


def _request(case):
    from dpofit.trace.request import TraceRequest

    return TraceRequest(**(MODEL | case))


@pytest.mark.parametrize("case", CASES)
def test_extrapolated_peaks_equal_the_full_depth_trace(case):
    from dpofit.trace.extrapolate import trace_deep, traced_peaks
    from dpofit.trace.step import trace_step

    request = _request(CASES[case])
    deep, whole = trace_deep(request), trace_step(request)
    assert "repeated" in deep.substitutions[-1]
    for space in ("gpu", "host_pinned", "host_pageable"):
        assert traced_peaks(deep, space) == traced_peaks(whole, space)
    assert {storage.module for storage in deep.recorder.storages} == {
        storage.module for storage in whole.recorder.storages
    }


@pytest.mark.skipif(not ALL, reason="--all runs it")
def test_the_optimizers_sub_groups_are_those_of_the_whole_depth():
    from dpofit.trace.extrapolate import trace_deep, traced_peaks
    from dpofit.trace.step import trace_step

    request = _request(_zero3(sub_group_size=200_000))
    deep, whole = traced_peaks(trace_deep(request)), traced_peaks(trace_step(request))
    phases = [key for key in whole if key[1] == 2]
    assert {"forward", "optimizer_step"} <= {phase for phase, _ in phases}
    assert all(0 <= whole[key] - deep[key] <= 64 for key in phases)  # step counters and norms, a few bytes a group


def test_what_has_no_period_is_traced_at_its_whole_depth():
    """Adapters fill a bucket over many layers; ZeRO-2 gives the first rank the first layers."""
    from dpofit.trace.extrapolate import trace_deep
    from dpofit.trace.shallow import shallow_layers

    traced = trace_deep(_request(_zero3(reduce_bucket_size=40_000) | {"finetuning": "lora"}))
    assert traced.substitutions[-1] == "no period was found at 5 layers: all traced"
    assert shallow_layers(_request({"deepspeed": {"zero_optimization": {"stage": 2}}})) is None


def test_a_bucket_that_only_the_whole_depth_fills_is_no_matter_of_a_few_layers():
    """Adapters of 19,456 elements a layer: six of twelve layers leave 150,000 unfilled."""
    from dpofit.trace.extrapolate import trace_deep

    case = _zero3(reduce_bucket_size=150_000) | {"finetuning": "lora", "steps": 1, "tokens": 16}
    traced = trace_deep(_request(case))
    assert traced.substitutions[-1] == "gradients fill the reduce bucket beyond 6 layers only: all traced"
