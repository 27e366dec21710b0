"""neat_packing: rows of several samples, with a mask from the collator or, under FlashAttention, their ends alone."""

import pytest

from dpofit.errors import BadInput
from dpofit.memory.predict import predict
from tests.memory.jobs import job, peaks, tiny

TOKENS = 4096


def _packed(**recipe):
    fields = {"stage": "sft", "pure_bf16": True, "neat_packing": True, "prompt": TOKENS - 8, "response": 8}
    return job(tiny(), nodes=1, gpus=1, **{**fields, **recipe})


def test_the_collators_mask_is_there_once_in_bf16_and_no_layer_makes_another():
    backward = peaks(_packed(flash_attn="sdpa"))["backward"].breakdown
    assert backward["attention_mask"] == TOKENS * TOKENS * 2


def test_flash_attention_needs_no_mask():
    assert "attention_mask" not in peaks(_packed(flash_attn="fa2"))["backward"].breakdown


@pytest.mark.parametrize("recipe", [{"micro_batch": 2}, {"evaluates": True}])  # evaluation takes 8 rows by default
def test_flash_attention_takes_one_packed_row(recipe):
    with pytest.raises(BadInput, match="packed rows at once, which LLaMA-Factory refuses"):
        predict(_packed(flash_attn="fa2", **recipe))
