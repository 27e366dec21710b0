"""The transcribed estimators against the real ones of DeepSpeed and accelerate."""

import pytest
from score_cases import measured_cases, planned
from score_others import accelerate_bytes, deepspeed_gpu_bytes

pytestmark = pytest.mark.stack

FULL = {
    case.name: planned(case.job).job
    for case in measured_cases()
    if case.name in ("qwen1-qwen-7b-full-1x2-t256", "arctic-h100-sp1-llama-8b-baseline-t32000")
}


@pytest.mark.parametrize("name", sorted(FULL))
def test_deepspeed_says_the_same_of_zero_3(name) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    job = FULL[name]
    offload = job.zero.offload_param == "cpu"
    _, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
        job.model.parameters, job.model.embedding_parameters, job.cluster.gpus_per_node, 1, offload, offload
    )
    assert deepspeed_gpu_bytes(job) == gpu_bytes


def test_accelerate_says_the_same_of_a_bf16_model() -> None:
    from accelerate.commands.estimate import estimate_training_usage

    job = FULL["qwen1-qwen-7b-full-1x2-t256"]
    assert accelerate_bytes(job) == max(estimate_training_usage(4 * job.model.parameters, "bfloat16").values())
