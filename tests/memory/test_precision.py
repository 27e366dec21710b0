"""DeepSpeed without ZeRO, gradients in fp32, training in fp32, an emptied cache: against bytes worked out by hand."""

from __future__ import annotations

import pytest
from jobs import job, peaks, tiny, zero

from dpofit.errors import BadInput
from dpofit.memory.allocator import EMPTY_CACHE, replay
from dpofit.memory.disk import disk_use
from dpofit.memory.predict import predict

P = tiny().parameters


def small(**fields):
    return job(tiny(), nodes=1, prompt=8, response=8, **{"gpus": 8, "stage": "sft", **fields})


def test_stage_0_keeps_masters_and_moments_whole_and_takes_all_gradients_to_fp32():
    step = peaks(small(zero=zero(0)))["optimizer_step"].breakdown
    assert step["weights"] == 2 * P
    assert step["optimizer"] == (4 + 8) * P
    assert step["gradients"] == 2 * P
    assert step["optimizer_workspace"] == 4 * P


def test_stage_0_takes_a_first_step_at_init():
    init = peaks(small(zero=zero(0), optim="adamw_torch"))["init"].breakdown
    assert init["gradients"] == (2 + 4) * P
    assert init["optimizer_workspace"] == 4 * P  # foreach AdamW's square roots


def test_stage_1_lets_go_of_whole_gradients_before_the_step():
    # deepspeed 0.18.4 traced: a rank's averaged gradients are all that is left
    step = peaks(small(zero=zero(1, reduce_bucket_size=1000)))["optimizer_step"].breakdown
    assert step["gradients"] < 2 * P


def test_fp32_gradient_partitions_double_zero_3s_and_are_refused_where_deepspeed_changes_its_engine():
    narrow, wide = (peaks(small(zero=zero(3, grad_accum_dtype=dtype)))["forward"].breakdown["gradients"]
                    for dtype in (None, "fp32"))  # fmt: skip
    assert wide == 2 * narrow == 4 * -(-P // 8)
    with pytest.raises(BadInput, match="fp32 gradients at stage 1"):
        predict(small(zero=zero(1, grad_accum_dtype="fp32")))


def test_fp16_looks_for_overflow_in_fp32_with_three_masks():
    plain, half = (
        peaks(small(zero=zero(2), bf16=not fp16, fp16=fp16))["optimizer_step"].breakdown for fp16 in (False, True)
    )
    vectors = sum(linear.out_features for linear in tiny().linears if linear.bias) + 2 * 64
    share = (P - 4 * vectors - 64) // 8  # of the matrices; vectors are a group of their own
    # whole gradients of what the first rank has a part of: the embedding, the first layer's biases and a norm of it
    held = 2 * (1000 * 64 + 64 + 32 + 32 + 64)
    assert plain["gradients"] + plain["optimizer_workspace"] == held + 8 * share  # in float64 for the norm
    assert half["gradients"] + half["optimizer_workspace"] == held + (4 + 3 + 4) * share


def test_adapters_trained_in_fp32_without_autocast_are_those_of_pure_bf16():
    """LLaMA-Factory loads the base in its own 16 bits all the same (patcher.py infer_optim_dtype)."""
    lora = {"finetuning": "lora", "gpus": 1}
    pure, full = (peaks(small(**lora, bf16=False, pure_bf16=pure)) for pure in (True, False))
    assert {name: peak.size_bytes for name, peak in pure.items()} == {n: p.size_bytes for n, p in full.items()}


def test_emptying_the_cache_gives_back_what_nobody_uses():
    mib = 1 << 20
    events = [("a", 100 * mib, "s"), ("b", 100 * mib, "s"), ("a", -100 * mib, "s"), ("", 0, EMPTY_CACHE)]
    assert replay(events[:3], expandable=False).reserved_bytes == 200 * mib
    assert replay(events, expandable=False).reserved_bytes == 100 * mib


@pytest.mark.parametrize(("optim", "state_bytes"), [("adamw_torch", 8), ("lion_32bit", 4), ("sgd", 0)])
def test_a_checkpoint_under_zero_3_holds_masters_and_what_the_optimizer_keeps(optim, state_bytes):
    assert disk_use(small(zero=zero(3), optim=optim)).optimizer_bytes == (4 + state_bytes) * P
