"""A reference of its own: how it is stored; and outputs and norms in fp32."""

from tests.memory.jobs import job, peaks, tiny, zero

LINEARS = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256  # weights of a layer's linears
WHOLE = tiny().parameters


def _stored(**fields):
    return peaks(job(tiny(), finetuning="lora", gpus=1, nodes=1, prompt=8, response=8, **fields))["load"].breakdown


def test_adapters_need_no_second_model_unless_one_is_named():
    assert "reference" not in _stored()
    assert _stored(ref_model="another")["reference"] == 2 * WHOLE


def test_a_named_reference_is_not_quantized_with_the_policy():
    assert _stored(ref_model="another", quantization_bit=4)["reference"] == 2 * WHOLE


def test_a_reference_in_four_bits_keeps_the_rest_in_bf16():
    stored = _stored(ref_model="another", ref_model_quantization_bit=4, double_quantization=False)["reference"]
    assert stored == 2 * (WHOLE - 4 * LINEARS) + 4 * LINEARS * 9 // 16  # half a byte, and an fp32 scale for 64 weights


def test_adapters_of_the_reference_are_merged_into_it():
    assert _stored(ref_model="another", ref_model_adapters="its")["reference"] == 2 * WHOLE


def test_pissa_takes_weights_to_fp32_one_by_one_at_load():
    plain, pissa = _stored(), _stored(pissa_init=True)
    assert sum(pissa.values()) - sum(plain.values()) == 3 * 4 * 64 * 256


def test_fp32_logits_of_sft_replace_the_bf16_ones():
    plain, upcast = (
        peaks(job(tiny(vocab=50_000), stage="sft", zero=zero(3), prompt=1016, response=8, upcast_lmhead_output=on))
        for on in (False, True)
    )
    entries = 1024 * 50_000
    assert plain["forward"].breakdown["logits"] == 10 * entries
    assert upcast["forward"].breakdown["logits"] == 8 * entries


def test_fp32_norms_give_adapters_fp32_inputs_under_autocast_only():
    fields = {"finetuning": "lora", "gpus": 1, "nodes": 1, "prompt": 1016, "response": 8}
    one, wide = (peaks(job(tiny(vocab=100), upcast_layernorm=on, **fields))["backward"] for on in (False, True))
    assert wide.size_bytes > one.size_bytes
    one, wide = (peaks(job(tiny(), upcast_layernorm=on, zero=zero(2), **fields))["backward"] for on in (False, True))
    assert wide.size_bytes == one.size_bytes
