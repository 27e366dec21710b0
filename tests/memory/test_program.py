"""The event program: consistent, and folded and collapsed without changing what it says."""

from __future__ import annotations

import pytest
from jobs import GPU, job, tiny, zero

from dpofit.memory.allocator import replay
from dpofit.memory.meter import phase_peaks
from dpofit.memory.program import Program
from dpofit.memory.step import build_program, plan_steps
from dpofit.memory.unroll import requests

KINDS = {
    "full zero3": {"zero": zero(3)},
    "full zero3 padded": {"zero": zero(3), "padded": True, "flash_attn": "sdpa"},
    "full zero2": {"zero": zero(2), "gradient_accumulation": 4},
    "full zero1": {"zero": zero(1), "gradient_accumulation": 2},
    "full autocast": {"gradient_accumulation": 2},
    "full no gc": {"zero": zero(3), "gradient_checkpointing": False},
    "full no gc liger": {"zero": zero(3), "gradient_checkpointing": False, "liger": True},
    "full unsloth gc": {"zero": zero(3), "use_unsloth_gc": True, "liger": True},
    "full offload": {"zero": zero(3, offload_optimizer="cpu", offload_param="cpu", optimizer_pin_memory=True)},
    "full zero2 offload": {"zero": zero(2, offload_optimizer="cpu")},
    "lora zero3": {"zero": zero(3), "finetuning": "lora"},
    "lora autocast": {"finetuning": "lora", "padded": True, "flash_attn": "eager"},
    "qlora": {"finetuning": "lora", "quantization_bit": 4},
    "lora sft dropout": {"finetuning": "lora", "stage": "sft", "lora_dropout": 0.1},
    "sft liger": {"stage": "sft", "liger": True, "zero": zero(3)},
    "sft liger autocast": {"stage": "sft", "liger": True},
    "orpo evaluates": {"pref_loss": "orpo", "zero": zero(3), "evaluates": True},
    "dpo evaluates": {"zero": zero(3), "evaluates": True, "padded": True, "flash_attn": "sdpa"},
}


def program(kind: str, **model) -> Program:
    planned = job(tiny(**model), prompt=300, response=50, nodes=1, gpus=2, **KINDS[kind])
    return build_program(planned, plan_steps(planned))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_free_frees_what_was_allocated(kind, tied):
    program(kind, tie_word_embeddings=tied).check()


@pytest.mark.parametrize("kind", KINDS)
def test_qwen1_and_qwen3_layers_are_consistent_too(kind):
    qwen3 = {"model_type": "qwen3", "head_dim": 16}
    qwen1 = {"model_type": "qwen", "kv_channels": 16, "seq_length": 2048, "num_key_value_heads": None}
    for model in (qwen3, qwen1):
        fields = {key: value for key, value in model.items() if value is not None}
        program(kind, **fields).check()


@pytest.mark.parametrize("kind", KINDS)
def test_folding_repeats_gives_the_peaks_of_the_unrolled_events(kind):
    built = program(kind, layers=7)
    live, highest = 0, {}
    for phase, _, event in built.events():
        key = (phase.name, phase.step)
        highest[key] = max(highest.get(key, 0), live)  # what earlier phases left counts too
        if event.space == "gpu":
            live += event.size_bytes
        highest[key] = max(highest[key], live)
    folded = {(peak.phase, peak.step): peak.size_bytes for peak in phase_peaks(built, GPU)}
    assert {key: folded[key] for key in highest} == highest


@pytest.mark.parametrize("kind", KINDS)
def test_a_breakdown_adds_up_to_its_peak(kind):
    for peak in phase_peaks(program(kind), GPU):
        assert sum(peak.breakdown.values()) == peak.size_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_freed_is_freed_under_the_category_it_was_allocated_under(kind, tied):
    alive: dict[str, str] = {}
    for _, storage, event in program(kind, tie_word_embeddings=tied).events():
        if event.size_bytes > 0:
            alive[storage] = event.category
        else:
            assert alive.pop(storage) == event.category, storage


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("kind", ["full zero3", "full no gc", "lora zero3", "full autocast", "sft liger"])
def test_collapsing_middle_layers_hardly_changes_what_is_reserved(kind, expandable):
    planned = job("Qwen/Qwen2.5-7B", prompt=3000, response=72, nodes=1, gpus=2, **KINDS[kind])
    built = build_program(planned, plan_steps(planned))
    whole = ((storage, event.size_bytes, event.stream) for _, storage, event in built.events() if event.space == "gpu")
    short = (request for phase in built.phases for request in requests(phase))
    reserved = [replay(events, expandable=expandable).peak_reserved_bytes for events in (whole, short)]
    assert reserved[1] == pytest.approx(reserved[0], rel=0.02)


def test_a_first_step_never_peaks_above_the_steady_one():
    """It has no prefetch and, before its update, no Adam states: a prediction need not show it."""
    for kind in KINDS:
        found = {(peak.phase, peak.step): peak.size_bytes for peak in phase_peaks(program(kind), GPU)}
        for (phase, step), size_bytes in found.items():
            if step == 1:
                assert size_bytes <= found[phase, 2], (kind, phase)
