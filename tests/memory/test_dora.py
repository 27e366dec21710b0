"""DoRA: a magnitude for each output beside the adapter's matrices, and the whole weight made again in every forward."""

import pytest

from dpofit.errors import BadInput
from dpofit.memory.predict import predict
from tests.memory.jobs import job, peaks, tiny


def _planned(**recipe):
    fields = {"finetuning": "lora", "stage": "sft", "gpus": 1, "nodes": 1, "prompt": 4, "response": 4, "liger": True}
    return job(tiny(vocab=8, hidden=512), **{**fields, **recipe})


def test_each_output_of_a_target_has_a_magnitude_trained_in_fp32():
    with_dora, without = _planned(use_dora=True), _planned()
    outputs = 4 * (512 + 2 * 256 + 512 + 2 * 2048 + 512)  # layers x (q, k and v, o, gate and up, down)
    assert with_dora.trained_parameters - without.trained_parameters == outputs
    states, before = (peaks(planned)["optimizer_step"].breakdown["optimizer"] for planned in (with_dora, without))
    assert states - before == 8 * outputs


def test_a_forward_makes_the_weight_as_often_as_peft_does():
    """Widest at down_proj, 2,048 wide: an fp32 unit matrix, then lora_B @ lora_A and its multiple in bf16, the weight
    and the sum in fp32; with rows of 8 tokens nothing else counts."""
    workspace = peaks(_planned(use_dora=True))["forward"].breakdown["workspace"]
    unit, weight = 2048 * 2048, 512 * 2048
    assert workspace == pytest.approx(4 * unit + (2 + 2 + 4 + 4) * weight, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "named"),
    [({"quantization_bit": 4}, "DoRA on a quantized base"), ({"lora_dropout": 0.1}, "DoRA with dropout")],
)
def test_what_is_not_modelled_of_it_is_refused_by_name(recipe, named):
    with pytest.raises(BadInput, match=named):
        predict(_planned(use_dora=True, **recipe))
