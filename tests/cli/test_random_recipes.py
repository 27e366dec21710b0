"""Any recipe gets an answer: random valid YAMLs through predict, check, limits and advise, and random wrong ones.

The recipes combine every knob the memory model reads. DPOFIT_TEST_ALL=1 tries many more of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dpofit.errors import BadInput
from dpofit.memory.job import Job
from dpofit.memory.optimizers import OPTIMIZERS
from dpofit.memory.predict import default_mix, predict
from dpofit.memory.screen import screen
from dpofit.plan import JobFlags, plan_job
from dpofit.recipe.keys import known_keys
from dpofit.recipe.long_context import PIECES
from tests.cli.conftest import Ran

Recipe = dict[str, Any]
Answer = TypeVar("Answer")
MANY = os.environ.get("DPOFIT_TEST_ALL")


def tries(few: int, many: int) -> settings:
    return settings(max_examples=many if MANY else few, derandomize=True, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck))  # fmt: skip


TINY = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": False}  # fmt: skip
MODELS: dict[str, Recipe] = {
    "qwen2": {"model_type": "qwen2"},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "llama": {"model_type": "llama"},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
}
BASE: Recipe = {"do_train": True, "dataset": "pairs", "template": "qwen", "output_dir": "out", "bf16": True}
BASES = st.fixed_dictionaries(
    {
        "model_name_or_path": st.sampled_from(sorted(MODELS)),
        "stage": st.sampled_from(["dpo", "dpo", "dpo", "kto", "rm", "sft"]),
        "finetuning_type": st.sampled_from(["full", "lora", "lora", "freeze"]),
        "deepspeed": st.sampled_from([None, None, *(f"ds_z{kind}_config.json" for kind in (
            "0", "2", "2_offload", "3", "3", "3_offload"))]),
        "per_device_train_batch_size": st.sampled_from([1, 1, 2, 3]),
        "gradient_accumulation_steps": st.sampled_from([1, 1, 4]),
        "cutoff_len": st.sampled_from([64, 200, 256]),
    }
)  # fmt: skip


def knob(**values: list[Any]) -> st.SearchStrategy[Recipe]:
    """Keys that belong together, each with one of its values."""
    return st.fixed_dictionaries({key: st.sampled_from(choices) for key, choices in values.items()})


KNOBS = st.one_of(
    knob(pref_loss=["sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo"]),
    knob(pref_ftx=[0.5]),
    knob(ld_alpha=[0.5]),
    knob(ref_model=["qwen2", "llama"], ref_model_quantization_bit=[None, 4, 8]),
    knob(freeze_trainable_layers=[1, -1, 3], freeze_trainable_modules=["all", "self_attn", "mlp"]),
    knob(freeze_extra_modules=["embed_tokens", "norm,lm_head"]),
    knob(lora_rank=[1, 16], lora_target=["all", "q_proj,v_proj", "down_proj"], lora_dropout=[0, 0.1]),
    knob(additional_target=["embed_tokens", "lm_head", "embed_tokens,lm_head,norm"]),
    knob(resize_vocab=[True]),
    knob(use_dora=[True]),
    knob(use_rslora=[True], pissa_init=[True, False]),
    knob(quantization_bit=[4, 8], double_quantization=[True, False], quantization_type=["nf4", "fp4"]),
    knob(quantization_bit=[8], quantization_method=["hqq", "eetq"]),
    knob(bf16=[False], fp16=[True]),
    knob(bf16=[True, False], pure_bf16=[True]),
    knob(upcast_layernorm=[True]),
    knob(upcast_lmhead_output=[True]),
    knob(disable_gradient_checkpointing=[True]),
    knob(use_reentrant_gc=[False]),
    knob(gradient_checkpointing=[True], gradient_checkpointing_kwargs=[None, {"use_reentrant": False}]),
    knob(use_unsloth_gc=[True]),
    knob(use_unsloth=[True]),
    knob(enable_liger_kernel=[True]),
    knob(flash_attn=["fa2", "sdpa", "disabled"]),
    knob(optim=sorted(OPTIMIZERS), weight_decay=[0, 0.1]),
    knob(use_galore=[True], galore_rank=[4], galore_layerwise=[True, False], galore_target=["all", "mlp"]),
    knob(use_apollo=[True], apollo_rank=[4], apollo_layerwise=[True, False], apollo_proj=["random", "svd"]),
    knob(use_badam=[True], badam_mode=["layer", "ratio"]),
    knob(use_adam_mini=[True]),
    knob(use_muon=[True]),
    knob(rope_scaling=["linear", "dynamic", "llama3", "yarn"]),
    knob(eval_strategy=["epoch"], val_size=[0.1], per_device_eval_batch_size=[1, 8]),
    knob(packing=[True], neat_packing=[True, False]),
    knob(torch_empty_cache_steps=[1, 5]),
    knob(save_strategy=["no", "epoch"], save_only_model=[True, False], save_total_limit=[None, 1]),
)
RECIPES = st.builds(
    lambda base, knobs: {**BASE, **base, **{key: value for one in knobs for key, value in one.items()}},
    BASES, st.lists(KNOBS, max_size=4),
)  # fmt: skip
LONG_CONTEXT = st.one_of(
    st.none(), st.none(), st.sets(st.sampled_from(PIECES), min_size=1).map(lambda pieces: ",".join(sorted(pieces)))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**TINY, **config}))
    return folder


def written(folder: Path, recipe: Recipe) -> str:
    models = {key: str(folder / recipe[key]) for key in ("model_name_or_path", "ref_model") if recipe.get(key)}
    path = folder / "recipe.yaml"  # JSON is YAML
    path.write_text(json.dumps({key: value for key, value in {**recipe, **models}.items() if value is not None}))
    return str(path)


def answers(ran: Ran, command: str) -> bool:
    """Is there an answer, not a traceback? True for a document of the command, False for problems named one by one."""
    if ran.exit_code == 2:
        if command == "check" and ran.out:  # what is no recipe is a finding too
            return not ran.json["findings"]
        assert ran.out == ""
        assert ran.err and all(line.startswith("error: ") for line in ran.err.splitlines()), ran.err
        return False
    assert ran.exit_code in (0, 1)
    assert ran.json["schema"] == f"dpofit.{command}/1"
    return True


CLUSTER = ["--gpu", "4GiB", "--nodes", "1", "--host-ram", "64GiB"]


@tries(few=30, many=3000)
@given(recipe=RECIPES, gpus=st.sampled_from([1, 2, 8]), pieces=LONG_CONTEXT)
def test_a_valid_recipe_is_answered_by_every_planning_command(dpofit, folder, recipe, gpus, pieces):
    path = written(folder, recipe)
    flags = [*CLUSTER, "--gpus-per-node", str(gpus), *(["--long-context", pieces] if pieces else [])]
    assert answers(dpofit("check", path, "--json"), "check")
    planned = [answers(dpofit(command, path, *flags, "--json"), command) for command in ("predict", "limits", "advise")]
    assert len(set(planned)) == 1, "what one can plan all can"


WRONG = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**12), st.floats(), st.text(max_size=8), st.just([]),
    st.just({}), st.sampled_from(["auto", "a,b", "${x}", "1e309", "-0", "/nowhere", [None], {"a": [1]}]),
)  # fmt: skip


@tries(few=40, many=3000)
@given(recipe=RECIPES, wrong=st.dictionaries(st.sampled_from(sorted(known_keys())), WRONG, min_size=1, max_size=3),
       command=st.sampled_from(["predict", "check", "limits", "advise"]))  # fmt: skip
def test_a_wrong_value_anywhere_is_named_and_never_a_traceback(dpofit, folder, recipe, wrong, command):
    path = folder / "wrong.json"
    given = {**json.loads(Path(written(folder, recipe)).read_text()), **wrong}
    path.write_text(json.dumps(given), encoding="utf-8")
    answers(dpofit(command, str(path), *(CLUSTER if command != "check" else []), "--json"), command)


# What more of anything costs

FLAGS = JobFlags(gpu="4GiB", nodes=1, gpus_per_node=2, host_ram="64GiB", prompt=96, response=32)


def planned(folder: Path, recipe: Recipe, flags: JobFlags = FLAGS, layers: int = 3) -> Job:
    """The job; what LLaMA-Factory refuses or nobody models is not what these tests are about."""
    shape = folder / f"{recipe['model_name_or_path']}-{layers}"
    if not shape.exists():
        shape.mkdir()
        config = {**TINY, **MODELS[recipe["model_name_or_path"]], "num_hidden_layers": layers}
        (shape / "config.json").write_text(json.dumps(config))
    try:
        return plan_job(written(folder, {**recipe, "model_name_or_path": shape.name}), [], flags).job
    except BadInput:
        assume(False)
        raise


def of(answer: Callable[[Job], Answer], job: Job) -> Answer:
    try:
        return answer(job)
    except BadInput:
        assume(False)
        raise


def allocated_bytes(job: Job) -> int:
    """predict's, without the replay of the allocator, which it does not depend on."""
    return screen(job, default_mix(job)).allocated_bytes


def with_flags(**changed: Any) -> JobFlags:
    return replace(FLAGS, **changed)


Pair = Callable[[Path, Recipe, str | None], tuple[Job, Job]]
MORE: dict[str, Pair] = {
    "prompt": lambda folder, recipe, pieces: (
        planned(folder, recipe, with_flags(long_context=pieces)),
        planned(folder, recipe, with_flags(long_context=pieces, prompt=200)),
    ),
    "batch": lambda folder, recipe, pieces: (
        planned(folder, {**recipe, "per_device_train_batch_size": 1}, with_flags(long_context=pieces)),
        planned(folder, {**recipe, "per_device_train_batch_size": 3}, with_flags(long_context=pieces)),
    ),
    "layers": lambda folder, recipe, pieces: (
        planned(folder, recipe, with_flags(long_context=pieces)),
        planned(folder, recipe, with_flags(long_context=pieces), layers=5),
    ),
}


@pytest.mark.parametrize("what", MORE)
@tries(few=25, many=2000)
@given(recipe=RECIPES, pieces=LONG_CONTEXT)
def test_more_of_it_needs_no_less_memory(what, folder, recipe, pieces):
    less, more = (of(allocated_bytes, job) for job in MORE[what](folder, recipe, pieces))
    assert less <= more


@tries(few=25, many=2000)
@given(recipe=RECIPES, pieces=LONG_CONTEXT, more=st.sampled_from([3, 4, 8, 16]))
def test_more_gpus_need_no_more_memory_on_each_under_zero3(folder, recipe, pieces, more):
    recipe = {**recipe, "deepspeed": "ds_z3_config.json"}
    few, many = (
        of(predict, planned(folder, recipe, with_flags(long_context=pieces, gpus_per_node=gpus))) for gpus in (2, more)
    )
    assert many.gpu.allocated_bytes <= few.gpu.allocated_bytes
    assert many.gpu.high_bytes <= few.gpu.high_bytes
