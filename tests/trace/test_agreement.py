"""Closed form and trace, which share only the event format, give the same bytes (the grid: benchmarks/agreement.py)."""

import importlib.util
import os
from pathlib import Path

import pytest

from dpofit.recipe.recipe import Badam

pytestmark = pytest.mark.stack

_FILE = Path(__file__).parents[2] / "benchmarks" / "agreement.py"
SMALL = {"model": "Qwen/Qwen2.5-0.5B", "tokens": 512}

POINTS = {
    "dpo": {"pure_bf16": True},
    "dpo, autocast, Liger": {"liger": True},
    "orpo, eager attention": {"pure_bf16": True, "pref_loss": "orpo", "attention": "disabled"},
    "sft, no checkpointing": {"pure_bf16": True, "stage": "sft", "checkpointing": "none"},
    "adapters on 8 bits": {"finetuning": "lora", "stage": "sft", "recipe": (("quantization_bit", 8),)},
    "adapters on 4 bits": {"finetuning": "lora", "pure_bf16": True, "recipe": (("quantization_bit", 4),)},
    "adapters, unsloth gc": {"finetuning": "lora", "checkpointing": "unsloth"},
    "adapters, unsloth": {
        "finetuning": "lora",
        "recipe": (("use_unsloth", True), ("environment", {"UNSLOTH_BLOCK_COMPILE": "0"})),
    },
    "DeepSpeed without ZeRO": {"zero": "z0"},
    "Phi-3, ZeRO-3": {"model": "microsoft/Phi-3-mini-4k-instruct", "zero": "z3", "stage": "sft"},
    "Phi-3": {"model": "microsoft/Phi-3-mini-4k-instruct", "pure_bf16": True, "stage": "sft"},
    "Phi-3, ZeRO-3, adapters: fetched ahead until the reference leaves the policy's record": {
        "model": "microsoft/Phi-3-mini-4k-instruct",
        "zero": "z3",
        "finetuning": "lora",
    },
    "Phi-4-mini, adapters, Liger: slices copied": {
        "model": "microsoft/Phi-4-mini-instruct",
        "finetuning": "lora",
        "stage": "sft",
        "liger": True,
        "checkpointing": "none",
    },
    "Gemma 2: soft caps, norms around, eager by itself": {
        "model": "google/gemma-2-2b",
        "finetuning": "lora",
        "stage": "sft",
        "pure_bf16": True,
        "attention": "auto",
        "tokens": 1024,
    },
    "Gemma 2, Liger, ZeRO-3": {"model": "google/gemma-2-2b", "liger": True, "zero": "z3"},
    "Gemma 3, rows longer than the window": {
        "model": "google/gemma-3-1b-it",
        "stage": "sft",
        "pure_bf16": True,
        "padded": False,
        "tokens": 2048,
    },
    "GLM-4, adapters, Liger": {
        "model": "zai-org/GLM-4-9B-0414",
        "finetuning": "lora",
        "liger": True,
        "stage": "sft",
        "checkpointing": "none",
    },
    "ZeRO-1": {"zero": "z1"},
    "ZeRO-2": {"zero": "z2"},
    "ZeRO-3, offloaded": {"zero": "z3_offload"},
    "ZeRO-3, Adafactor": {"zero": "z3", "optim": "adafactor"},
    "ZeRO-3, adapters": {"zero": "z3", "finetuning": "lora"},
    "kto, one row": {"stage": "kto", "pure_bf16": True},
    "kto, ZeRO-3, adapters": {"stage": "kto", "zero": "z3", "finetuning": "lora"},
    "rm, adapters, unsloth gc": {"stage": "rm", "finetuning": "lora", "checkpointing": "unsloth"},
    "rm, ZeRO-3": {"stage": "rm", "zero": "z3"},
    "rm, ZeRO-3, adapters": {"stage": "rm", "zero": "z3", "finetuning": "lora"},
    "rm, ZeRO-2: a head without a gradient": {"stage": "rm", "zero": "z2"},
    "rm, ZeRO-2, round robin: gradients come with the flush that touches a partition": {
        "model": "Qwen/Qwen2.5-7B",
        "stage": "rm",
        "zero": "z2_round_robin",
        "checkpointing": "none",
        "liger": True,
    },
    "kto, ZeRO-3, no checkpointing: layers stay gathered": {
        "stage": "kto",
        "zero": "z3",
        "checkpointing": "none",
        "liger": True,
    },
    "sft, ZeRO-3, adapters, Liger: the head's weight is fetched by the module around it": {
        "model": "Qwen/Qwen2.5-7B",
        "stage": "sft",
        "zero": "z3",
        "finetuning": "lora",
        "liger": True,
    },
    "sft, ZeRO-3, adapters: prefetch": {"stage": "sft", "zero": "z3", "finetuning": "lora"},
    "sft, adapters, Liger": {"stage": "sft", "finetuning": "lora", "pure_bf16": True, "liger": True},
    "sft, Liger, autocast: the head's gradient is added up in fp32": {"stage": "sft", "liger": True},
    "ZeRO-2, offloaded: the look for overflow": {"zero": "z2_offload"},
    "two micro-batches": {"recipe": (("gradient_accumulation", 2),)},
    "two micro-batches, ZeRO-1": {"zero": "z1", "recipe": (("gradient_accumulation", 2),)},
    "rm, ZeRO-1, overlap_comm: reduced as they appear, others' large gradients stay": {
        "stage": "rm",
        "zero": "z1_overlap",
    },
    "two micro-batches, ZeRO-2": {"zero": "z2", "recipe": (("gradient_accumulation", 2),)},
    "two micro-batches, ZeRO-3: what the first leaves gathered": {
        "model": "Qwen/Qwen2.5-7B",
        "zero": "z3",
        "recipe": (("gradient_accumulation", 2),),
    },
    "adapters, a quantized reference, fp32 norms and logits": {
        "finetuning": "lora",
        "recipe": (
            ("ref_model", "another"),
            ("ref_model_quantization_bit", 4),
            ("upcast_layernorm", True),
            ("upcast_lmhead_output", True),
        ),
    },
    "DoRA, Liger": {
        "model": "meta-llama/Llama-3.1-8B",
        "finetuning": "lora",
        "stage": "sft",
        "liger": True,
        "recipe": (("use_dora", True),),
    },
    "DoRA, ZeRO-3": {"finetuning": "lora", "stage": "sft", "zero": "z3", "recipe": (("use_dora", True),)},
    "Muon": {"stage": "sft", "recipe": (("use_muon", True),)},
    "BAdam: bf16 weights under autocast, layers above without checkpoints": {
        "stage": "sft",
        "optim": "adamw_torch",
        "recipe": (("badam", Badam("layer", "ascending")),),
    },
    "neat packing, two rows": {
        "stage": "sft",
        "liger": True,
        "pure_bf16": True,
        "pairs": 2,
        "tokens": 1032,
        "recipe": (("neat_packing", True),),
    },
    "adapters, tables beside them": {
        "finetuning": "lora",
        "recipe": (("additional_target", ("embed_tokens", "lm_head")),),
    },
    "freeze: MLPs of the first layers and every norm": {
        "finetuning": "freeze",
        "recipe": (("freeze_layers", -2), ("freeze_modules", ("mlp",)), ("freeze_extra", ("norm",))),
    },
    "freeze under ZeRO-3: the first layer, others without checkpoints": {
        "finetuning": "freeze",
        "zero": "z3",
        "recipe": (("freeze_layers", -1),),
    },
}


@pytest.fixture(scope="module")
def agreement():
    return _benchmark("agreement")


def _benchmark(name):
    import sys

    sys.path.insert(0, str(_FILE.parent))  # it imports its report
    spec = importlib.util.spec_from_file_location(name, _FILE.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", POINTS)
def test_peak_within_one_percent_phases_within_two_and_the_same_phase_wins(agreement, name):
    of_peak, worst, of_worst, same = agreement.errors(agreement.compare(agreement.Point(**(SMALL | POINTS[name]))))
    assert abs(of_peak) <= 0.01
    assert abs(of_worst) <= 0.02, worst
    assert same


@pytest.mark.skipif(not os.environ.get("DPOFIT_TEST_ALL"), reason="a minute or two for each family: --all")
def test_every_family_agrees(agreement):
    apart = []
    for point in agreement.families():
        of_peak, worst, of_worst, same = agreement.errors(agreement.compare(point))
        if abs(of_peak) > 0.01 or abs(of_worst) > 0.02 or not same:
            apart.append(f"{point}: peak {of_peak:+.2%}, {worst} {of_worst:+.2%}")
    assert apart == []


def test_what_stands_for_unsloths_functions_keeps_and_allocates_what_they_did():
    """benchmarks/unsloth_functions.py ran the originals and wrote down what they took."""
    import json

    import dpofit.trace.unsloth

    benchmark = _benchmark("unsloth_functions")
    document = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))
    assert document["unsloth"] == "2026.10.9"
    ours = {name: benchmark.measured(make) for name, make in benchmark.cases(dpofit.trace.unsloth).items()}
    assert ours == document["functions"]
