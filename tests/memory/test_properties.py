"""What must hold for any job: more of anything costs no less memory, more GPUs no more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import job, tiny, zero

from dpofit.memory.job import Job, Lengths
from dpofit.memory.predict import predict

RECIPES = st.fixed_dictionaries(
    {
        "stage": st.sampled_from(["dpo", "sft"]),
        "finetuning": st.sampled_from(["full", "lora"]),
        "pref_loss": st.sampled_from(["sigmoid", "orpo", "ipo"]),
        "gradient_checkpointing": st.booleans(),
        "use_unsloth_gc": st.booleans(),
        "liger": st.booleans(),
        "flash_attn": st.sampled_from(["auto", "fa2", "disabled"]),
        "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit"]),
        "gradient_accumulation": st.integers(1, 3),
        "evaluates": st.booleans(),
        "padded": st.booleans(),
        "zero": st.sampled_from([None, zero(1), zero(2), zero(3), zero(3, overlap_comm=False)]),
    }
)
SLOW = settings(max_examples=40, deadline=None)


def planned(recipe: dict, layers: int = 3, **fields) -> Job:
    if recipe["zero"] is not None and recipe["finetuning"] == "lora":
        recipe = {**recipe, "gradient_accumulation": 1}
    return job(tiny(layers), **{"prompt": 200, "response": 56, "nodes": 1, "gpus": 2, **recipe, **fields})


def allocated(found: Job) -> int:
    return predict(found).gpu.allocated_bytes


def trace_is_the_same(first: Job, second: Job) -> bool:
    return first.zero_stage < 3 or second.zero_stage < 3 or first.model.layers == second.model.layers


@SLOW
@given(RECIPES, st.integers(1, 40), st.integers(1, 40))
def test_longer_prompts_need_no_less(recipe, short, more):
    found = planned(recipe)
    lengths = [Lengths(8 * tokens, 8, 8, recipe["padded"]) for tokens in (short, short + more)]
    assert allocated(replace(found, lengths=lengths[0])) <= allocated(replace(found, lengths=lengths[1]))


@SLOW
@given(RECIPES, st.integers(1, 3))
def test_larger_batches_need_no_less(recipe, more):
    assert allocated(planned(recipe, micro_batch=1)) <= allocated(planned(recipe, micro_batch=1 + more))


@SLOW
@given(RECIPES, st.integers(1, 4))
def test_deeper_models_need_no_less(recipe, more):
    assert allocated(planned(recipe, layers=2)) <= allocated(planned(recipe, layers=2 + more))


WORSE = ("fits", "tight", "oom")


@SLOW
@given(RECIPES, st.integers(1, 3), st.booleans(), st.floats(0.5, 1.2))
def test_more_gpus_never_need_more_of_each_under_zero3(recipe, doublings, expandable, share):
    """On cards that are about full, too: there what is really reserved may grow, since a failing cudaMalloc no longer
    gives cached memory back, but neither the interval nor the verdict says so."""
    model = tiny(3, vocab=20_000, hidden=512)
    recipe = {**recipe, "zero": zero(3), "expandable_segments": expandable}
    fewer = {**recipe, "prompt": 1000, "response": 24, "nodes": 1, "gpus": 2}
    wanted = predict(job(model, gpu=2**50, **fewer)).gpu.high_bytes
    few, many = (
        predict(job(model, gpu=int(wanted * share), **{**fewer, "gpus": gpus})) for gpus in (2, 2 ** (1 + doublings))
    )
    assert many.gpu.allocated_bytes <= few.gpu.allocated_bytes
    assert many.gpu.low_bytes <= few.gpu.low_bytes
    assert many.gpu.high_bytes <= few.gpu.high_bytes
    assert WORSE.index(many.verdict) <= WORSE.index(few.verdict)


@SLOW
@given(RECIPES)
def test_a_prediction_is_consistent_with_itself(recipe):
    prediction = predict(planned(recipe))
    gpu, host = prediction.gpu, prediction.host
    assert gpu.low_bytes <= gpu.peak_bytes <= gpu.high_bytes
    assert gpu.allocated_bytes <= gpu.reserved.peak_bytes
    assert host.low_bytes <= host.peak_bytes <= host.high_bytes
    assert sum(gpu.peak.breakdown.values()) == gpu.allocated_bytes
