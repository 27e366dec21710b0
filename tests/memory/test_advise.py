"""Advice does what it says: applied to the job it makes it fit, and nothing in it can be left out."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpofit.cli.advise import Command
from dpofit.memory.advise import Advice, Workbench, advise
from dpofit.memory.popular import NoHelp, would_not_help
from dpofit.memory.predict import Prediction, predict
from dpofit.plan import JobFlags, plan_job

BASE = {
    "model_name_or_path": "model", "stage": "dpo", "do_train": True, "dataset": "pairs", "template": "qwen",
    "output_dir": "out", "val_size": 0.1, "bf16": True, "per_device_train_batch_size": 1, "optim": "adamw_torch_fused",
}  # fmt: skip
SHAPES = {  # what dominates → (layers, hidden size, vocabulary)
    "logits": (2, 64, 100_000),
    "states": (2, 2048, 1000),
    "layers": (2, 512, 1000),
}
JOBS = 1000 if os.environ.get("DPOFIT_TEST_ALL") else 100
RECIPES = st.fixed_dictionaries(
    {
        "finetuning_type": st.sampled_from(["full", "lora"]),
        "deepspeed": st.sampled_from([None, "ds_z2_config.json", "ds_z3_config.json", "ds_z3_offload_config.json"]),
        "per_device_train_batch_size": st.sampled_from([1, 1, 2, 4]),
        "gradient_accumulation_steps": st.sampled_from([1, 4]),
        "pref_loss": st.sampled_from(["sigmoid", "sigmoid", "orpo"]),
        "cutoff_len": st.sampled_from([512, 1024, 2048]),
        "flash_attn": st.sampled_from(["auto", "fa2", "disabled"]),
        "disable_gradient_checkpointing": st.booleans(),
        "use_unsloth_gc": st.booleans(),
        "enable_liger_kernel": st.booleans(),
        "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused"]),
        "eval_strategy": st.sampled_from(["no", "epoch"]),
        "save_total_limit": st.sampled_from([None, 2]),
    }
)


@dataclass(frozen=True)
class Advised:
    command: Command
    bench: Workbench
    advice: Advice

    @property
    def first(self) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment of the first suggestion."""
        return self.command.written(self.advice.suggestions[0].changes)

    @property
    def no_help(self) -> dict[str, NoHelp]:
        return {found.id: found for found in would_not_help(self.bench, self.advice)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("advise")
    for name, (layers, hidden, vocabulary) in SHAPES.items():
        config = {
            "model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 8192, "tie_word_embeddings": False,
        }  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def asked(folder: Path, flags: JobFlags, shape: str = "logits", **recipe: Any) -> Command:
    """The command line `RECIPE FLAGS`; `recipe` over BASE."""
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({**BASE, "model_name_or_path": str(folder / shape), **recipe}))
    return Command(str(path), [], flags, plan_job(str(path), [], flags))


def advised(command: Command, most: int = 6) -> Advised:
    planned = command.planned
    bench = Workbench(planned.job, planned.mix, command.replan)
    return Advised(command, bench, advise(bench, predict(planned.job, planned.mix), most))


def squeezed(folder: Path, share: float, host_share: float | None, gpus: int, shape: str, recipe: dict) -> Command:
    """The command on cards of `share` of what the job would like, and nodes of `host_share` of the RAM it would."""
    roomy = asked(folder, JobFlags(gpu="500GiB", nodes=1, gpus_per_node=gpus), shape, **recipe)
    wanted = predict(roomy.planned.job)
    ram = None if host_share is None else f"{max(wanted.host.high_bytes / 2**30 * host_share, 1):.3f}GiB"
    card = f"{max(wanted.gpu.high_bytes / 2**30 * share, 1):.3f}GiB"
    flags = replace(roomy.flags, gpu=card, host_ram=ram)
    return asked(folder, flags, shape, **recipe)


def applied(command: Command, arguments: list[str], environment: dict[str, str]) -> Prediction:
    """What the command predicts with arguments appended, read as the command line reads them."""
    flags = {
        "--gpu": "gpu", "--nodes": "nodes", "--gpus-per-node": "gpus_per_node", "--host-ram": "host_ram",
        "--prompt": "prompt", "--long-context": "long_context",
    }  # fmt: skip
    words = iter(arguments)
    overrides, changed = [], {}
    for word in words:
        if word in flags:
            value = next(words)
            changed[flags[word]] = int(value) if value.isdigit() else value
        else:
            overrides.append(word)
    with pytest.MonkeyPatch.context() as process:
        for name, value in environment.items():
            process.setenv(name, value)
        planned = plan_job(command.reference, overrides, replace(command.flags, **changed))
    return predict(planned.job, planned.mix)


@settings(max_examples=JOBS, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(SHAPES)), RECIPES, st.sampled_from([1, 2, 8]), st.floats(0.5, 1.05),
       st.sampled_from([None, 0.8, 3.0]))  # fmt: skip
def test_the_first_suggestion_applied_to_a_random_job_makes_it_fit(folder, shape, recipe, gpus, share, host_share):
    recipe = {key: value for key, value in recipe.items() if value is not None}
    found = advised(squeezed(folder, share, host_share, gpus, shape, recipe), most=1)
    screened = found.bench.screen(())
    assert screened is not None
    if found.advice.base.verdict == "fits":
        assert found.advice.suggestions == () and screened.may_fit  # the screen never turns down what fits
    elif found.advice.suggestions:
        assert applied(found.command, *found.first).verdict == "fits"


@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["states", "layers"]), RECIPES, st.sampled_from([2, 8]), st.floats(0.5, 0.8))
def test_no_change_of_a_suggestion_can_be_left_out(folder, shape, recipe, gpus, share):
    recipe = {key: value for key, value in recipe.items() if value is not None}
    found = advised(squeezed(folder, share, None, gpus, shape, recipe))
    for suggestion in found.advice.suggestions:
        for change in suggestion.changes if len(suggestion.changes) > 1 else ():
            fewer = [other for other in suggestion.changes if other is not change]
            assert applied(found.command, *found.command.written(fewer)).verdict != "fits"


A100X8 = JobFlags(gpu="a100-80g", nodes=1, gpus_per_node=8, host_ram="1000GiB")
SEVEN_B = {"model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"}


def test_a_job_that_fits_gets_no_advice(folder):
    found = advised(asked(folder, A100X8, finetuning_type="lora", cutoff_len=1024, **SEVEN_B))
    assert found.advice.base.verdict == "fits"
    assert (found.advice.suggestions, found.no_help) == ((), {})


def test_a_piece_that_raises_the_peak_is_named_where_the_job_fits_and_where_it_does_not():
    """Both were traced with four layers: 8.4 → 10.6 GiB for adapters of a 72B at 8k + 1k, where the reference's forward
    on the same engine had kept DeepSpeed from gathering ahead; and the tiles' fp32 sums on short rows."""
    assert (
        "allocated peak 24.3 GiB → 26.5 GiB: with one forward a step" in raising("lora-long", 8192)["cached_reference"]
    )
    assert list(raising("full-z3-long", 4096)) == ["tiled_mlp"]
    assert list(raising("full-z3-long", 4096, gpu="40GiB")) == ["tiled_mlp"]  # does not fit
    assert raising("full-z3-long", 32_768) == {}


def raising(recipe: str, prompt: int, **flags: Any) -> dict[str, str]:
    """Pieces named as raising the peak of a 72B recipe on its own cluster, and why."""
    given = JobFlags(prompt=prompt, response=1024, **flags)
    name = f"qwen2.5-72b-dpo/{recipe}"
    planned = plan_job(name, [], given)
    bench = Workbench(planned.job, planned.mix, Command(name, [], given, planned).replan)
    found = would_not_help(bench, Advice(predict(planned.job, planned.mix), ()))
    return {one.id.removeprefix("piece-"): one.why for one in found if one.id.startswith("piece-")}


def test_a_default_evaluation_batch_is_the_first_thing_to_lower(folder):
    """8 pairs of fp32 logits in the first evaluation: 16 x 4,096 x 152,064 x 4 bytes are 37 GiB, several times."""
    recipe = {"finetuning_type": "lora", "cutoff_len": 4096, "eval_strategy": "epoch", **SEVEN_B}
    found = advised(asked(folder, A100X8, **recipe))
    assert found.advice.base.gpu.peak.phase == "eval"
    assert found.first == (["per_device_eval_batch_size=1"], {})


def test_a_smaller_micro_batch_keeps_the_update_as_large(folder):
    recipe = {"finetuning_type": "lora", "cutoff_len": 4096, "per_device_train_batch_size": 4,
              "gradient_accumulation_steps": 2, **SEVEN_B}  # fmt: skip
    found = advised(asked(folder, A100X8, **recipe))
    written = [found.command.written(suggestion.changes)[0] for suggestion in found.advice.suggestions]
    assert ["per_device_train_batch_size=1", "gradient_accumulation_steps=8"] in written


def test_full_fine_tuning_without_deepspeed_is_sharded(folder):
    found = advised(asked(folder, A100X8, finetuning_type="full", cutoff_len=2048, **SEVEN_B))
    assert "deepspeed=deepspeed/z3.json" in [
        argument for suggestion in found.advice.suggestions
        for argument in found.command.written(suggestion.changes)[0]
    ]  # fmt: skip
    assert found.advice.suggestions[0].kind == "same"


def test_a_host_too_small_for_offload_gets_the_offload_back(folder):
    recipe = {"finetuning_type": "full", "cutoff_len": 2048, "deepspeed": "ds_z3_offload_config.json", **SEVEN_B}
    found = advised(asked(folder, replace(A100X8, host_ram="100GiB"), **recipe))
    assert found.advice.base.host_verdict == "oom"
    assert found.first == (["deepspeed=deepspeed/z3.json"], {})


def test_a_small_disk_keeps_fewer_or_lighter_checkpoints(folder):
    """7.6e9 parameters x 14 bytes are 99 GiB a checkpoint: three at once and the weights are 312 GiB."""
    recipe = {"finetuning_type": "full", "cutoff_len": 1024, "deepspeed": "ds_z3_config.json", "save_total_limit": 2,
              **SEVEN_B}  # fmt: skip
    found = advised(asked(folder, replace(A100X8, disk="250GiB"), **recipe))
    assert (found.advice.base.disk_verdict, found.advice.base.gpu_verdict) == ("oom", "fits")
    assert found.first == (["save_total_limit=1"], {})
    lighter = advised(asked(folder, replace(A100X8, disk="100GiB"), **recipe))
    assert lighter.first == (["save_only_model=true"], {})


def test_more_nodes_are_the_fewest_that_fit(folder):
    recipe = {"finetuning_type": "full", "cutoff_len": 2048, "deepspeed": "ds_z3_config.json", **SEVEN_B}
    flags = JobFlags(gpu="24GiB", nodes=1, gpus_per_node=8, host_ram="64GiB")
    found = advised(asked(folder, flags, **recipe))
    [nodes] = [change.nodes for suggestion in found.advice.suggestions for change in suggestion.changes
               if suggestion.kind == "cluster" and len(suggestion.changes) == 1]  # fmt: skip
    assert nodes is not None
    assert applied(found.command, ["--nodes", str(nodes)], {}).verdict == "fits"
    assert applied(found.command, ["--nodes", str(nodes - 1)], {}).verdict != "fits"


def test_orpo_comes_last_and_is_marked(folder):
    flags = JobFlags(gpu="a100-80g", nodes=1, gpus_per_node=1, prompt=9500, response=1024)
    found = advised(asked(folder, flags, finetuning_type="lora", flash_attn="fa2", **SEVEN_B))
    kinds = [suggestion.kind for suggestion in found.advice.suggestions]
    assert kinds[-1] == "method" and kinds.count("method") == 1
    assert found.command.written(found.advice.suggestions[-1].changes)[0] == ["pref_loss=orpo"]


def test_cutting_the_data_sets_cutoff_len_and_the_prompt_that_was_asked_for(folder):
    flags = JobFlags(gpu="a100-80g", nodes=1, gpus_per_node=1, prompt=9500, response=1024)
    found = advised(asked(folder, flags, finetuning_type="lora", **SEVEN_B))
    [cut] = [suggestion for suggestion in found.advice.suggestions if suggestion.kind == "data"]
    row, prompt = cut.prediction.job.lengths.row_tokens, cut.prediction.job.lengths.prompt
    assert prompt + 1024 == row < 9500 + 1024
    assert found.command.written(cut.changes)[0] == [f"cutoff_len={row}", "--prompt", str(prompt)]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_fixed_segments_are_told_to_grow(folder, monkeypatch, variable):
    roomy = JobFlags(gpu="500GiB", nodes=1, gpus_per_node=1)
    recipe = {"finetuning_type": "lora", "cutoff_len": 4096, "flash_attn": "fa2", **SEVEN_B}
    monkeypatch.setenv(variable, "expandable_segments:True")
    enough = predict(asked(folder, roomy, **recipe).planned.job).gpu.high_bytes / 2**30
    monkeypatch.setenv(variable, "expandable_segments:False")
    found = advised(asked(folder, replace(roomy, gpu=f"{enough + 0.1:.2f}GiB"), **recipe))
    grown = [suggestion for suggestion in found.advice.suggestions if suggestion.changes[0].expandable]
    arguments, environment = found.command.written(grown[0].changes)
    assert arguments == []
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert applied(found.command, arguments, environment).verdict == "fits"


def test_popular_changes_are_answered_from_the_job(folder):
    flags = JobFlags(gpu="rtx4090", nodes=1, gpus_per_node=1, host_ram="64GiB")
    found = advised(asked(folder, flags, finetuning_type="lora", cutoff_len=12000, **SEVEN_B))
    no_help = found.no_help
    logits = 2 * 12000 * 152_064 * 4 / 2**30  # one fp32 tensor of them: 13.6 GiB
    assert logits > 13
    assert "DPO needs its logits of 2 rows x 152,064 words" in no_help["liger"].why
    assert no_help["accumulation"].gpu_saved_bytes == -2 * 40_370_176  # adapters' gradients that wait
    assert no_help["micro-batch-1"].why == "1 already; a pair is two rows, and they go together"
    assert "without ZeRO every GPU holds everything" in no_help["nodes"].why
    pinned = no_help["unsloth-gc"].host_added_bytes
    # 28 layers and one more for the reference's forward; 2 x 12,000 x 3,584 x 2 bytes are 164 MiB, rounded to 256.
    assert pinned == (28 + 1) * 256 * 2**20


def test_offload_saves_states_and_nothing_else(folder):
    """The states of the LoRA job are its base, 15.2e9 bytes, and what trains the adapters."""
    flags = JobFlags(gpu="rtx4090", nodes=1, gpus_per_node=1, host_ram="64GiB")
    found = advised(asked(folder, flags, finetuning_type="lora", cutoff_len=12000, **SEVEN_B))
    offload = found.no_help["offload"]
    assert offload.gpu_saved_bytes is not None and offload.host_added_bytes is not None
    assert 0.9 * 15.2e9 < offload.gpu_saved_bytes < 1.1 * 15.2e9
    assert offload.host_added_bytes > 15.2e9


def test_nothing_helps_a_model_that_no_card_holds(folder):
    flags = JobFlags(gpu="2GiB", nodes=1, gpus_per_node=1, prompt=8, response=8)
    found = advised(asked(folder, flags, finetuning_type="lora", quantization_bit=4, pref_loss="orpo",
                          use_unsloth_gc=True, enable_liger_kernel=True, flash_attn="fa2", **SEVEN_B))  # fmt: skip
    assert found.advice.base.verdict == "oom"
    assert found.advice.suggestions == ()


def test_a_card_smaller_than_what_a_process_takes_is_out_of_memory(folder):
    assert predict(asked(folder, JobFlags(gpu="1GiB", nodes=1, gpus_per_node=1)).planned.job).verdict == "oom"
