"""The real long-context pieces inside the traced trainer allocate what the closed form says, alone and together."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dpofit.hardware.cluster import Cluster
from dpofit.hardware.gpus import find_gpu
from dpofit.memory.host import sticky_pinned
from dpofit.memory.job import Job, Lengths
from dpofit.memory.meter import phase_peaks
from dpofit.memory.predict import predict
from dpofit.models.known import find_model
from dpofit.recipe.long_context import PIECES
from dpofit.recipe.recipe import Recipe, ZeroConfig

pytestmark = pytest.mark.stack

AUTO = {"reduce_bucket_size": "auto", "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto"}
Z3 = ZeroConfig("z3", 3, overlap_comm=True, **AUTO)
Z3_OFFLOAD = replace(
    Z3, offload_optimizer="cpu", offload_param="cpu", optimizer_pin_memory=True, param_pin_memory=True
)  # fmt: skip
Z2 = replace(Z3, source="z2", stage=2)
HALF_B, SEVEN_B = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"
SHORT, LONG = Lengths(1000, 600, 700), Lengths(5000, 600, 700)  # long: more than one tile of the MLP

POINTS = {
    "all, adapters, a given reference": (PIECES, {"finetuning": "lora", "pure_bf16": True, "ref_model": "given"}),
    "all, ZeRO-3": (PIECES, {"zero": Z3}),
    "adapters, ZeRO-3 with offload": (
        ("cached_reference", "offload_checkpoints"),
        {"zero": Z3_OFFLOAD, "finetuning": "lora"},
    ),
}
if os.environ.get("DPOFIT_TEST_ALL"):
    POINTS |= {piece: ((piece,), {"pure_bf16": True}) for piece in PIECES}
    POINTS |= {f"{piece}, ZeRO-3": ((piece,), {"zero": Z3}) for piece in PIECES}
    POINTS |= {f"{piece}, adapters": ((piece,), {"finetuning": "lora", "pure_bf16": True}) for piece in PIECES}
    POINTS |= {
        "all": (PIECES, {"pure_bf16": True}),
        "all, Liger": (PIECES, {"pure_bf16": True, "liger": True}),
        "all, autocast": (PIECES, {"bf16": True}),
        "all, adapters": (PIECES, {"finetuning": "lora", "pure_bf16": True}),
        "all, adapters, ZeRO-3": (PIECES, {"zero": Z3, "finetuning": "lora"}),
        "all, ZeRO-3, a given reference": (PIECES, {"zero": Z3, "ref_model": "given"}),
        "all, ZeRO-3 with offload, a given reference": (PIECES, {"zero": Z3_OFFLOAD, "ref_model": "given"}),
        "ZeRO-2, a given reference": (("cached_reference",), {"zero": Z2, "ref_model": "given"}),
        "KTO": (("cached_reference",), {"pure_bf16": True, "stage": "kto"}),
        "KTO, ZeRO-3": (("cached_reference", "answer_logps"), {"zero": Z3, "stage": "kto"}),
        "stock, ZeRO-3 with offload": ((), {"zero": Z3_OFFLOAD}),
        "all, ZeRO-3 with offload": (PIECES, {"zero": Z3_OFFLOAD}),
        "a layer, ZeRO-3 with offload": (
            ("offload_checkpoints",),
            {"zero": Z3_OFFLOAD, "finetuning": "freeze", "freeze_layers": 1},
        ),
        "answers of SFT": (("answer_logps",), {"stage": "sft", "pure_bf16": True}),
    }


def planned(pieces: tuple[str, ...], **recipe) -> Job:
    """Four layers: of a 7B under ZeRO-3, where no parameter is too small to move, else of a 0.5B."""
    zero = recipe.get("zero")
    model = replace(find_model(SEVEN_B if zero else HALF_B), layers=4)
    fields = {"stage": "dpo", "finetuning": "full", "bf16": zero is not None, "flash_attn": "auto", **recipe}
    built = Recipe(
        name="t", source=Path("t.yaml"), settings={}, model=model.name, micro_batch=1, optim="adamw_torch_fused",
        long_context=frozenset(pieces), **fields,
    )  # fmt: skip
    lengths = LONG if "tiled_mlp" in pieces else SHORT
    return Job(built, model, Cluster(find_gpu("a100-80g"), 1, 8 if zero else 1), lengths)


def test_flops_of_a_step_with_all_pieces_are_the_sum_written_out() -> None:
    """Tiles cost no multiplications: what they compute again, checkpointing does not."""
    from dpofit.trace.job import request_of
    from dpofit.trace.reference_pass import BATCHES
    from dpofit.trace.step import trace_step

    layers, hidden, mlp, kv, vocabulary = 4, 896, 4864, 128, 151_936
    prompt, chosen, rejected = 5000, 600, 700
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp  # weights of q and o, k and v, the MLP
    linear = 2 * layers * layer * (prompt + chosen + rejected)
    scores = (prompt + chosen) ** 2 + rejected * (prompt + rejected)  # of its two calls, as if nothing were masked
    attention = 4 * layers * hidden * scores
    head = 2 * vocabulary * hidden * (chosen + rejected)
    request = request_of(planned(PIECES, pure_bf16=True, liger=True))
    flops = trace_step(replace(request, steps=1, optimizer="")).recorder.flops
    in_step = sum(count for (_, step), count in flops.items() if step == 1)
    # forward, its recomputation, twice that for gradients; attention's backward computes the scores once more
    assert in_step == pytest.approx(4 * linear + (2 + 2.5) * attention + 4 * head, rel=1e-3)
    assert flops["reference_forward", 0] == pytest.approx(BATCHES * (linear + attention + head), rel=1e-3)


@pytest.mark.parametrize("name", POINTS)
def test_peak_within_one_percent_phases_within_two_and_the_same_host_memory(name: str) -> None:
    from dpofit.report.traced import compared_peaks
    from dpofit.trace.job import trace_job

    pieces, recipe = POINTS[name]
    job = planned(pieces, **recipe)
    program, prediction = trace_job(job), predict(job)
    traced = compared_peaks(program)
    assert ("reference_forward" in traced) is job.has_reference  # cached_reference's is the pass before step 1
    predicted = {phase: prediction.gpu.phases[phase].size_bytes for phase in traced}
    assert max(predicted.values()) == pytest.approx(max(traced.values()), rel=0.01)
    assert predicted == pytest.approx(traced, rel=0.02)
    assert max(predicted, key=predicted.__getitem__) == max(traced, key=traced.__getitem__)
    pinned = max(peak.size_bytes for peak in phase_peaks(sticky_pinned(program), frozenset({"host_pinned"})))
    # Norms and biases of a flat buffer of their own (Trainer's group without decay) are less than this.
    assert prediction.host.pinned_bytes / job.cluster.gpus_per_node == pytest.approx(pinned, abs=2**17)
