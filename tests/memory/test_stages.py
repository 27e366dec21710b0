"""What a step of KTO costs beside DPO's."""

import pytest

from dpofit.memory.speed import step_time
from tests.memory.jobs import job, peaks, tiny, zero

ENTRIES = 2 * 1024 * 50_000  # rows x tokens x vocabulary


def _bytes_an_entry(phase, **fields):
    planned = job(tiny(vocab=50_000), zero=zero(3), prompt=1016, response=8, **fields)
    return peaks(planned)[phase].breakdown["logits"] / ENTRIES


@pytest.mark.parametrize(
    ("phase", "bytes_an_entry"),
    [
        # kept of the policy: fp32 logits 4, log-softmax 4; the KL pass adds its logits 4, log-softmax 4, its copy 4
        ("forward", 20),
        # kept: the policy's chosen and rejected logits 4, log-softmax 4, the reference's logits 4; its KL pass adds 12
        ("reference_forward", 24),
        ("backward", 12),
    ],
)
def test_kto_keeps_one_more_forward_than_dpo(phase, bytes_an_entry):
    assert _bytes_an_entry(phase, stage="kto", micro_batch=2) == pytest.approx(bytes_an_entry, rel=0.002)


def test_one_row_without_its_last_token_is_contiguous_and_not_copied():
    one = _bytes_an_entry("reference_forward", stage="kto", micro_batch=1) * 2
    assert one == pytest.approx(20, rel=0.002)


def test_a_batch_of_kto_is_single_answers():
    assert job(tiny(), stage="kto", micro_batch=3).rows == 3


def test_a_reward_model_makes_logits_that_nobody_keeps():
    fields = {"stage": "rm", "zero": zero(3), "prompt": 1016, "response": 8}
    planned = peaks(job(tiny(vocab=50_000), **fields))
    assert planned["forward"].breakdown["logits"] == 6 * ENTRIES  # bf16, and fp32 beside it (trl's .float())
    assert "logits" not in planned["backward"].breakdown


def test_a_reward_model_keeps_every_layers_states_to_the_end_of_its_forward():
    planned = peaks(job(tiny(layers=6), stage="rm", use_unsloth_gc=True, prompt=1016, response=8))
    assert planned["forward"].breakdown["hidden_states"] == 6 * 2 * 1024 * 64 * 4  # layers, rows, tokens, hidden, fp32
    assert "hidden_states" not in planned["backward"].breakdown


def test_a_reward_models_output_head_is_never_updated():
    planned = job(tiny(), stage="rm", prompt=8, response=8, gpus=1, nodes=1)
    step = peaks(planned)["optimizer_step"].breakdown
    head = 1000 * 64
    assert step["optimizer"] == 8 * (planned.model.parameters - head)
    assert step["weights"] == 4 * planned.model.parameters


def test_kto_takes_two_forwards_of_each_model():
    dpo, kto = (
        step_time(job(tiny(), stage=stage, micro_batch=batch, zero=zero(3)))
        for stage, batch in (("dpo", 1), ("kto", 2))
    )
    assert 1.3 < kto.compute_s / dpo.compute_s < 1.45  # 7 forwards' worth where DPO has 5, a head of 1,000 words aside
