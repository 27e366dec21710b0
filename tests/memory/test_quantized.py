"""A frozen base in few bits, against bytes worked out by hand."""

from __future__ import annotations

import pytest
from jobs import job, peaks, tiny

from dpofit.errors import BadInput
from dpofit.memory.predict import predict
from dpofit.memory.quantized import stored_bytes
from dpofit.memory.spec import Quantization
from dpofit.models.shape import Linear

LINEAR = Linear("q_proj", 1024, 4096, bias=True)  # 4,194,304 weights: 65,536 blocks of 64, 256 blocks of 256 of those


def qlora(bits: int, **recipe):
    fields = {"nodes": 1, "gpus": 1, "prompt": 2048, "response": 2048, "finetuning": "lora", **recipe}
    return job("Qwen/Qwen2.5-7B", quantization_bit=bits, **fields)


def test_four_bits_are_half_a_byte_and_a_scale_for_64_weights():
    assert stored_bytes(Quantization("bnb", 4), LINEAR) == 2_097_152 + 65_536 * 4
    assert stored_bytes(Quantization("bnb", 4, nested=True), LINEAR) == 2_097_152 + 65_536 + 256 * 4


def test_eight_bits_are_a_byte_and_a_scale_for_each_row():
    assert stored_bytes(Quantization("bnb", 8), LINEAR) == 4_194_304 + 4096 * 4


def test_a_7b_base_is_8_7_gb_in_eight_bits():
    """Embedding and head 2 x 1,089,994,752 B, 28 layers of 233,046,016 weights: 233 MB each; scales, biases, norms."""
    layers = 28 * (233_046_016 + 4 * 49_664 + 2 * (4_608 + 2 * 3_584))
    adapters = 28 * 8 * (2 * 7_168 + 2 * 4_096 + 3 * 22_528) * 4
    weights = peaks(qlora(8))["load"].breakdown["weights"]
    assert weights == layers + 2 * 1_089_994_752 + 2 * 3_584 + adapters


def test_the_output_head_is_never_quantized():
    head = peaks(qlora(4))["reference_forward"].breakdown
    assert "workspace" not in head  # no weight is being dequantized where the head's logits peak


def test_an_8_bit_linear_keeps_its_input_for_as_long_as_the_layer_lasts():
    narrow = tiny(vocab=8, hidden=256)  # so few words that backward peaks in a layer
    four, eight = (
        peaks(job(narrow, nodes=1, gpus=1, prompt=2048, response=2048, finetuning="lora", stage="sft",
                  quantization_bit=bits))["backward"].breakdown["activations"]
        for bits in (4, 8)
    )  # fmt: skip
    product = 4096 * 1024 * 2  # what down reads: its adapter's backward lets go of it, the 8-bit weight's does not
    assert eight - four == product


def test_eight_bits_without_checkpointing_is_refused_by_name():
    with pytest.raises(BadInput, match="8-bit base without gradient checkpointing"):
        predict(job(tiny(), finetuning="lora", quantization_bit=8, gradient_checkpointing=False))
