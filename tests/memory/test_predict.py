"""Verdicts, refusals, limits, the reserved figure and the interval."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import job, peaks, tiny, zero

from dpofit.errors import BadInput
from dpofit.memory import limits
from dpofit.memory.job import STACK_2024, Lengths
from dpofit.memory.limits import longest_prompt
from dpofit.memory.predict import predict
from dpofit.memory.scope import check_scope
from dpofit.memory.speed import step_time
from dpofit.memory.stack import parse_stack
from dpofit.recipe.recipe import Badam, LowRank

GIB = 2**30


def test_full_dpo_of_72b_at_8k_does_not_fit_32_cards_of_80_gb():
    prediction = predict(job(zero=zero(3)))
    assert prediction.verdict == prediction.gpu_verdict == "oom"
    assert prediction.gpu.low_bytes > prediction.gpu.capacity_bytes


def test_a_job_far_below_capacity_fits():
    assert predict(job(tiny(), zero=zero(3), prompt=100, response=20, nodes=1, gpus=2)).verdict == "fits"


def test_between_the_ends_of_the_interval_the_verdict_is_tight():
    easy = predict(job(zero=zero(3)))
    between = (easy.gpu.low_bytes + easy.gpu.high_bytes) // 2
    assert predict(job(zero=zero(3), gpu=between)).gpu_verdict == "tight"


def test_host_and_disk_verdicts_need_a_known_size():
    assert predict(job(zero=zero(3))).host_verdict is None
    small = predict(job(zero=zero(3), gpu="b200-180g", host_gib=100))
    assert (small.gpu_verdict, small.host_verdict, small.verdict) == ("fits", "oom", "oom")
    leaky = predict(job(zero=zero(3), gpu="b200-180g", host_gib=200))
    assert leaky.host_verdict == "tight"  # one copy of the 16-bit model fits, the leaked second does not


def test_without_expandable_segments_mixed_lengths_reserve_no_less():
    mix = tuple(Lengths(tokens, 512, 512, False) for tokens in (2048, 6144, 7168))
    on, off = (predict(job(zero=zero(3), gpu=400 * GIB, expandable_segments=flag), mix) for flag in (True, False))
    assert off.gpu.reserved.peak_bytes >= on.gpu.reserved.peak_bytes


def test_a_card_just_too_small_for_what_is_reserved_shows_retries_or_runs_out():
    roomy = predict(job(zero=zero(3), gpu=400 * GIB, expandable_segments=False))
    capacity = roomy.gpu.peak_bytes - 3 * GIB
    squeezed = predict(job(zero=zero(3), gpu=capacity, expandable_segments=False))
    assert squeezed.gpu.reserved.retries_per_step > 0 or squeezed.gpu.reserved.out_of_memory
    assert squeezed.verdict != "fits"


def test_the_stack_decides_expandable_segments_when_the_recipe_does_not():
    assert predict(job(tiny(), zero=zero(3), expandable_segments=None)).gpu.expandable
    assert not predict(job(tiny(), zero=zero(3), expandable_segments=None, stack=STACK_2024)).gpu.expandable


def test_foreach_adamw_needs_a_temporary_that_fused_does_not():
    fields = {"stage": "sft", "prompt": 8, "response": 8, "nodes": 1, "gpus": 1}
    fused, foreach = (
        peaks(job(tiny(), optim=optim, **fields))["optimizer_step"].breakdown.get("optimizer_workspace", 0)
        for optim in ("adamw_torch_fused", "adamw_torch")
    )
    assert foreach - fused == 4 * tiny().parameters


REFUSED = {
    "stage": {"stage": "ppo"},
    "finetuning_type": {"finetuning": "oft"},
    "optim": {"optim": "galore_adamw"},
    "quantization_bit": {"quantization_bit": 3, "finetuning": "lora"},
    "use_dora": {"use_dora": True, "finetuning": "lora", "quantization_bit": 4},
    "ref_model_adapters": {"ref_model": "x", "ref_model_adapters": "y", "zero": zero(3)},
    "ref_model_quantization_bit": {"ref_model": "x", "ref_model_quantization_bit": 4, "zero": zero(3)},
    "additional_target": {"additional_target": ("lm_head",), "finetuning": "lora", "zero": zero(3)},
    "use_unsloth": {"use_unsloth": True, "finetuning": "lora"},
    "upcast_layernorm": {"upcast_layernorm": True, "pure_bf16": True, "bf16": False},
    "bf16": {"bf16": False},
    "deepspeed": {"zero": zero(3, offload_param="nvme")},
    "use_muon": {"use_muon": True, "zero": zero(2)},
    "use_adam_mini": {"use_adam_mini": True, "zero": zero(2)},
    "use_badam": {"badam": Badam("layer", "ascending"), "zero": zero(3)},
    "use_galore": {"low_rank": LowRank("galore", 16, ("all",), "std", False, False), "zero": zero(2)},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_modelled_is_refused_by_name(key):
    with pytest.raises(BadInput) as refused:
        predict(job(tiny(), **REFUSED[key]))
    assert key in {problem.key for problem in refused.value.problems}


def test_shift_attn_is_refused_for_a_llama_and_does_nothing_to_others():
    with pytest.raises(BadInput, match="shift_attn of a Llama"):
        predict(job(tiny(model_type="llama"), shift_attn=True))
    plain, shifted = (predict(job(tiny(), shift_attn=on)).gpu.peak_bytes for on in (False, True))
    assert plain == shifted


def test_all_refusals_come_at_once():
    planned = job(tiny(), stage="ppo", optim="grokadamw", use_unsloth=True, finetuning="lora", lora_target=("wrong",))
    with pytest.raises(BadInput) as refused:
        check_scope(planned.recipe, planned.model)
    assert {p.key for p in refused.value.problems} >= {"stage", "optim", "use_unsloth", "lora_target"}


@pytest.mark.parametrize("recipe", [{"zero": zero(3)}, {"zero": zero(3), "use_unsloth_gc": True, "liger": True},
                                    {"finetuning": "lora", "zero": zero(3)}])  # fmt: skip
def test_the_longest_prompt_fits_and_the_next_does_not(recipe):
    planned = job("Qwen/Qwen2.5-7B", nodes=1, **recipe)
    limit = longest_prompt(planned)
    assert limit.binding == "gpu" and limit.prompt_tokens is not None

    def verdict(prompt: int) -> str:
        return predict(replace(planned, lengths=Lengths(prompt, 1024, 1024, False))).verdict

    assert verdict(limit.prompt_tokens) == "fits"
    assert verdict(limit.prompt_tokens + 8) != "fits"
    assert limit.not_oom_prompt_tokens is not None and limit.not_oom_prompt_tokens >= limit.prompt_tokens


def test_a_prompt_that_evaluation_binds_is_found_in_few_tries(monkeypatch):
    """Eight pairs of logits in evaluation against one in training: what training allocates says little."""
    tries = []
    monkeypatch.setattr(limits, "_try", lambda *asked, once=limits._try: tries.append(asked) or once(*asked))
    planned = job("Qwen/Qwen2.5-7B", nodes=1, zero=zero(3), finetuning="lora", evaluates=True, eval_micro_batch=8)
    limit = longest_prompt(planned)
    assert predict(limits.at_prompt(planned, limit.prompt_tokens)).verdict == "fits"
    beyond = predict(limits.at_prompt(planned, limit.prompt_tokens + 8))
    assert beyond.verdict != "fits" and beyond.gpu.peak.phase == "eval"
    assert predict(limits.at_prompt(planned, limit.not_oom_prompt_tokens + 8)).verdict == "oom"
    assert len(tries) < 20


def test_limits_name_the_host_when_it_binds():
    limit = longest_prompt(job(zero=zero(3), use_unsloth_gc=True, gpu=800 * GIB, host_gib=500))
    assert limit.binding == "host"


def test_limits_end_at_the_models_positions():
    planned = job(tiny(max_position_embeddings=2048), zero=zero(3), nodes=1, gpus=2)
    limit = longest_prompt(planned)
    assert (limit.prompt_tokens, limit.binding) == (1024, "none")  # 2,048 positions less answers of 1,024


def test_nothing_fits_where_states_alone_do_not():
    limit = longest_prompt(job(zero=zero(3), nodes=1))
    assert limit.prompt_tokens is None and limit.binding == "gpu"


def test_a_stack_is_named_or_spelled_out():
    assert parse_stack("2024") == STACK_2024
    assert parse_stack("transformers=4.48.0").transformers == "4.48.0"
    with pytest.raises(BadInput, match="pinned, 2024"):
        parse_stack("latest")
    with pytest.raises(BadInput, match=r"'torch=2\.x' is not known(.|\n)*names transformers twice"):
        parse_stack("transformers=4.48.0,torch=2.x,transformers=4.49.0")


def test_offload_and_recompute_cost_time_and_a_reference_costs_a_forward():
    stock = step_time(job(zero=zero(3)))
    assert step_time(job(zero=zero(3, offload_optimizer="cpu", offload_param="cpu"))).step_s > stock.step_s
    assert step_time(job(zero=zero(3), gradient_checkpointing=False)).compute_s < stock.compute_s
    orpo = step_time(job(zero=zero(3), pref_loss="orpo"))
    # forward, recompute, backward x 2, reference; a little more, since the head is not computed again
    assert 5 / 4 < stock.compute_s / orpo.compute_s < 1.01 * 5 / 4


def test_every_family_has_every_part_of_a_recipe_predicted():
    for name in ("microsoft/phi-4", "microsoft/Phi-4-mini-instruct", "google/gemma-2-9b", "google/gemma-3-1b-it",
                 "zai-org/glm-4-9b-chat-hf", "zai-org/GLM-4-9B-0414"):  # fmt: skip
        adapters = job(name, prompt=512, response=512, zero=zero(3), liger=True, finetuning="lora", flash_attn="auto")
        assert predict(adapters).verdict == "fits"


def test_auto_attention_is_eager_for_gemma_2_alone():
    assert job("google/gemma-2-9b", flash_attn="auto").attention == "eager"
    assert job("google/gemma-2-9b", flash_attn="fa2").attention == "flash"
    assert job("google/gemma-3-1b-it", prompt=64, response=64, flash_attn="auto").attention == "flash"


def test_rows_longer_than_a_window_take_a_mask_without_padding():
    assert job("mistralai/Mistral-7B-v0.1", prompt=2048, response=1024, flash_attn="sdpa").attention == "flash"
    assert job("mistralai/Mistral-7B-v0.1", prompt=4096, response=1024, flash_attn="sdpa").attention == "efficient"
    assert job("mistralai/Mistral-7B-v0.3", prompt=4096, response=1024, flash_attn="sdpa").attention == "flash"


def test_qwen_1_has_two_projections_of_one_name_and_an_adapter_at_each():
    qwen = job("Qwen/Qwen-7B", prompt=512, response=512, zero=zero(2), finetuning="lora", lora_target=("c_proj",))
    assert qwen.adapter_parameters == 32 * 8 * ((4096 + 4096) + (11008 + 4096))
    assert predict(qwen).verdict == "fits"
