"""Figures that pencil and paper give too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import job, peaks, tiny, zero

from dpofit.memory.disk import disk_use
from dpofit.memory.host import DRIVER_ALLOWANCE_BYTES, PROCESS_BYTES
from dpofit.memory.job import STACK_2024
from dpofit.memory.predict import predict

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
P72 = 72_706_203_648  # parameters of Qwen2.5-72B, published as 72.7 B
LOGITS = 2 * 9216 * 152064 * 4  # one fp32 tensor of 2 rows x 9,216 tokens x 152,064
SHIFTED = 2 * 9215 * 152064 * 4


def test_checkpoints_of_72b_at_two_rows_of_9216_tokens_are_24_2_gb():
    reference = peaks(job(zero=zero(3)))["reference_forward"]
    assert reference.breakdown["checkpoints"] == 80 * 2 * 9216 * 8192 * 2 == 24_159_191_040


def test_one_fp32_logits_tensor_of_72b_there_is_11_2_gb():
    assert LOGITS == 11_211_374_592
    loss = peaks(job(zero=zero(3)))["loss"]
    assert loss.breakdown["logits"] == LOGITS + SHIFTED  # fp32 logits for the metrics, log-softmax for backward


def test_dpo_peaks_in_the_reference_forward_with_five_vocabulary_wide_fp32_tensors():
    found = peaks(job(zero=zero(3)))
    highest = max(found.values(), key=lambda peak: peak.size_bytes)
    assert highest.phase == "reference_forward"
    assert highest.breakdown["logits"] == 2 * LOGITS + 3 * SHIFTED


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_without_a_reference_three_are_alive(loss):
    found = peaks(job(zero=zero(3), pref_loss=loss))
    assert "reference_forward" not in found
    assert found["forward"].breakdown["logits"] == LOGITS + 2 * SHIFTED


def test_zero3_shards_of_72b_on_32_gpus():
    init = peaks(job(zero=zero(3)))["init"]
    share = -(-P72 // 32)
    assert init.breakdown["weights"] == share * 2 == init.breakdown["reference"]
    step = peaks(job(zero=zero(3)))["forward"]
    assert step.breakdown["optimizer"] == share * 12  # fp32 master, two fp32 moments


def test_zero2_keeps_whole_bf16_models_on_every_gpu():
    forward = peaks(job("Qwen/Qwen2.5-7B", zero=zero(2), nodes=1))["forward"]
    assert forward.breakdown["weights"] == 7_615_616_512 * 2 == forward.breakdown["reference"]


def test_full_training_without_deepspeed_is_16_bytes_a_parameter_before_activations():
    step = peaks(job(tiny(), nodes=1, gpus=1, stage="sft", gradient_accumulation=2))["accumulate"]
    parameters = tiny().parameters
    assert step.breakdown["weights"] == 4 * parameters
    assert step.breakdown["optimizer"] == 8 * parameters
    assert step.breakdown["gradients"] >= 4 * parameters


def test_pure_bf16_with_foreach_adamw_peaks_at_10_bytes_a_parameter():
    """67.46 GiB measured for Mistral-7B: 7,241,732,096 x 10 B (benchmarks/cases, fms-acceleration)."""
    planned = job("mistralai/Mistral-7B-v0.1", stage="sft", nodes=1, gpus=1, pure_bf16=True, optim="adamw_torch",
                  prompt=16, response=16, stack=STACK_2024)  # fmt: skip
    assert peaks(planned)["optimizer_step"].size_bytes == pytest.approx(7_241_732_096 * 10, rel=1e-3)


def test_lora_has_no_second_model_and_a_72b_reference_is_one():
    assert "reference" not in peaks(job(finetuning="lora", zero=zero(3)))["forward"].breakdown
    assert "reference" in peaks(job(zero=zero(3)))["forward"].breakdown


def test_zero3_checkpoint_of_72b_is_14_bytes_a_parameter():
    disk = disk_use(job(zero=zero(3), save_total_limit=2))
    assert disk.checkpoint_bytes == 14 * P72
    assert disk.total_bytes == 3 * 14 * P72 + 2 * P72  # rotation comes after the save; then the final model


def test_zero2_checkpoint_adds_the_modules_own_16_bit_weights():
    assert disk_use(job(zero=zero(2))).checkpoint_bytes == 16 * P72


def test_unsloth_gc_pins_40_gib_a_rank_for_72b_at_9216_tokens():
    """80 layers x 302 MB, each block rounded to 512 MiB; a node of 8 pins 320 GiB."""
    planned = job(zero=zero(3), use_unsloth_gc=True)
    pinned = peaks(planned, frozenset({"host_pinned"}))["forward"]
    assert pinned.size_bytes == 80 * 2**29 == 40 * 2**30
    assert predict(planned).host.pinned_bytes == 320 * 2**30


def test_unsloth_gc_leaves_no_checkpoints_on_the_gpu():
    with_gc = peaks(job(zero=zero(3), use_unsloth_gc=True))["reference_forward"].size_bytes
    without = peaks(job(zero=zero(3)))["reference_forward"].size_bytes
    assert without - with_gc == pytest.approx(80 * 2 * 9216 * 8192 * 2, rel=0.02)


def test_native_save_of_72b_piles_the_16_bit_model_up_on_one_rank():
    host = predict(job(zero=zero(3))).host
    assert host.peak_bytes == 2 * P72 + 8 * PROCESS_BYTES
    leaked = 2 * P72  # the last save's copy still alive
    assert host.high_bytes == host.peak_bytes + leaked + 8 * DRIVER_ALLOWANCE_BYTES


def test_the_memory_of_a_bare_process_is_the_measured_one():
    measured = json.loads((BENCHMARKS / "results" / "process_rss.json").read_text(encoding="utf-8"))
    assert measured["rss_anon_bytes"]["process group"] == PROCESS_BYTES


def test_liger_does_not_remove_the_logits_of_dpo():
    stock, liger = (peaks(job(zero=zero(3), liger=on))["reference_forward"] for on in (False, True))
    assert stock.breakdown["logits"] == liger.breakdown["logits"]


def test_liger_removes_the_logits_of_sft():
    forward = peaks(job("Qwen/Qwen2.5-7B", stage="sft", liger=True, zero=zero(3), micro_batch=2))["forward"]
    tokens, chunk = 2 * 9216, 512  # next power of two of ceil(18,432 / ceil(152,064 / 3,584)) = 429
    assert forward.breakdown.get("logits", 0) <= chunk * 152_064 * 2
    assert tokens * 152_064 * 2 > 8 * chunk * 152_064 * 2


@pytest.mark.parametrize(
    ("transformers", "rows", "bytes_per_entry"),
    [("5.5.4", 2, 10), ("4.48.0", 2, 14), ("4.48.0", 1, 10)],  # one row's shifted logits are contiguous: no copy
)
def test_sft_loss_costs_what_its_transformers_line_does(transformers, rows, bytes_per_entry):
    from dataclasses import replace

    planned = job(tiny(vocab=50_000), stage="sft", zero=zero(3), micro_batch=rows, prompt=1016, response=8)
    planned = replace(planned, stack=replace(planned.stack, transformers=transformers))
    entries = rows * 1024 * 50_000
    assert peaks(planned)["forward"].breakdown["logits"] == pytest.approx(bytes_per_entry * entries, rel=0.002)


def test_sft_backward_holds_12_bytes_an_entry():
    planned = job(tiny(vocab=50_000), stage="sft", zero=zero(3), prompt=1016, response=8)
    assert peaks(planned)["backward"].breakdown["logits"] == 12 * 1024 * 50_000


def test_offloaded_states_leave_the_gpu_and_arrive_on_the_host():
    offload = {
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "optimizer_pin_memory": True,
        "param_pin_memory": True,
    }
    planned = job(zero=zero(3, **offload))
    forward = peaks(planned)["forward"]
    assert {"optimizer", "weights", "reference"} & set(forward.breakdown) == set()
    share = -(-P72 // 32)
    assert predict(planned).host.peak_bytes >= 8 * share * (
        12 + 4 + 2 + 2 + 2
    )  # masters, moments, grads, weights, reference
