"""use_unsloth: unsloth's layers under DPO with adapters on one GPU, as eager PyTorch runs them."""

import pytest
from jobs import job, peaks, tiny, zero

from dpofit.errors import BadInput
from dpofit.memory.predict import predict

EAGER = {"UNSLOTH_BLOCK_COMPILE": "0"}
UNSLOTH = {"finetuning": "lora", "use_unsloth": True, "environment": EAGER, "nodes": 1, "gpus": 1}


def problems(model=None, **recipe) -> set[tuple[str, str]]:
    with pytest.raises(BadInput) as refused:
        predict(job(model or tiny(), **(UNSLOTH | recipe)))
    return {(problem.key, problem.wrong.removesuffix(" is not modelled yet")) for problem in refused.value.problems}


def test_rows_padded_on_the_right_need_no_mask():
    padded, equal = (peaks(job(tiny(), padded=padded, flash_attn="auto", **UNSLOTH)) for padded in (True, False))
    assert {phase: peak.size_bytes for phase, peak in padded.items()} == {
        phase: peak.size_bytes for phase, peak in equal.items()
    }


def test_the_logits_set_the_peak_and_are_as_large_as_without():
    stock, unsloth = (peaks(job("Qwen/Qwen2.5-7B", **(UNSLOTH | {"use_unsloth": on}))) for on in (False, True))
    top = unsloth["reference_forward"]
    assert top.size_bytes == max(peak.size_bytes for peak in unsloth.values())
    assert top.breakdown["logits"] == stock["reference_forward"].breakdown["logits"]


def test_where_the_logits_are_small_the_layers_decide_and_keep_less():
    stock, unsloth = (peaks(job(tiny(vocab=8), **(UNSLOTH | {"use_unsloth": on}))) for on in (False, True))
    assert unsloth["backward"].size_bytes < stock["backward"].size_bytes


def test_compiled_layers_are_refused_they_are_the_default():
    refused = ("use_unsloth", "use_unsloth with layers that torch.compile plans, its default,")
    assert problems(environment={}) == {refused}
    assert problems(environment={"UNSLOTH_BLOCK_COMPILE": "1"}) == {refused}


def test_several_gpus_and_deepspeed_are_refused():
    assert problems(gpus=2) == {("use_unsloth", "use_unsloth on several GPUs")}
    assert problems(zero=zero(2)) == {("use_unsloth", "use_unsloth with DeepSpeed")}


@pytest.mark.parametrize("model_type", ["mistral", "qwen3"])
def test_families_with_layers_of_their_own_are_refused(model_type):
    assert problems(tiny(model_type=model_type)) == {("use_unsloth", f"use_unsloth on a {model_type}")}


@pytest.mark.parametrize(
    ("key", "recipe"),
    {
        "stage": {"stage": "sft"},
        "finetuning_type": {"finetuning": "full"},
        "lora_target": {"lora_target": ("q_proj", "v_proj")},
        "use_dora": {"use_dora": True},
        "additional_target": {"additional_target": ("embed_tokens",)},
        "quantization_bit": {"quantization_bit": 4},
        "ref_model": {"ref_model": "another"},
        "bf16": {"bf16": False, "pure_bf16": True},
        "upcast_layernorm": {"upcast_layernorm": True},
        "enable_liger_kernel": {"liger": True},
        "disable_gradient_checkpointing": {"gradient_checkpointing": False},
        "use_unsloth_gc": {"use_unsloth_gc": True},
        "use_reentrant_gc": {"use_reentrant_gc": False},
        "do_eval": {"evaluates": True},
    }.items(),
)
def test_what_was_not_traced_beside_it_is_refused_by_name(key, recipe):
    assert problems(**recipe) == {(key, f"{key} of use_unsloth")}


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-72B", "meta-llama/Llama-2-7b-hf", "01-ai/Yi-6B"])
@pytest.mark.parametrize("tokens", [1024, 16384])
def test_a_step_takes_more_than_unsloth_would_free_by_moving_the_embedding(name, tokens):
    """unsloth_zoo 2026.10.9 block_swap.py:573-584, unsloth models/_utils.py:9733-9749: with less than this free after
    the load, the input embedding goes to the host. Then a step of whole rows needs more than is free, moved or not."""
    planned = job(name, prompt=tokens - 256, response=256, **UNSLOTH)
    model, phases = planned.model, peaks(planned)
    step = max(peak.size_bytes for peak in phases.values()) - phases["load"].size_bytes
    activations = tokens * model.hidden_size * 48 + min(tokens, 2048) * model.vocab_size * 4
    kept_free = (activations + planned.trained_parameters * 16) * 17 // 16 + 2**28
    assert step > kept_free + model.embedding_parameters * 2


def test_a_note_says_how_its_layers_are_taken():
    from dpofit.memory.notes import prediction_notes

    notes = {note.id: note.text for note in prediction_notes(predict(job(tiny(), **UNSLOTH)), mix_given=True)}
    assert "uncompiled" in notes["unsloth-on-the-gpu"] and "checkpoints stay on the GPU" in notes["unsloth-on-the-gpu"]
