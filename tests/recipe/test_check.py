"""`check` says what is wrong or surprising about a recipe, once, with a stable id, and nothing about a good one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpofit.cli.app import main
from dpofit.hardware.gpus import find_gpu
from dpofit.recipe.advice import ADVICE
from dpofit.recipe.check import check_exit_code, check_recipe
from dpofit.recipe.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
Z3 = {"deepspeed": "examples/deepspeed/ds_z3_config.json"}
LORA = {"finetuning_type": "lora"}
# id → settings that bring it up in an otherwise good dpo recipe
SURPRISES = {
    "config.gradient-checkpointing-on": {"gradient_checkpointing": True},
    "config.gradient-checkpointing-reentrant": {"gradient_checkpointing": True, "use_reentrant_gc": False},
    "config.gradient-checkpointing-back": {"gradient_checkpointing": True, "disable_gradient_checkpointing": True},
    "config.gradient-checkpointing-kwargs": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "config.unsloth-gc-off": {"use_unsloth_gc": True, "disable_gradient_checkpointing": True},
    "config.unsloth-is-not-unsloth-gc": {"use_unsloth": True},
    "config.unsloth-cutoff": {**LORA, "use_unsloth": True, "cutoff_len": 9220},
    "config.liger-no-fused-loss": {"enable_liger_kernel": True},
    "config.liger-twice": {"use_liger_kernel": True},
    "config.eval-batch-default": {"eval_strategy": "steps", "val_size": 0.1},
    "config.eval-data-unused": {"val_size": 0.1},
    "config.train-batch-default": {"without": "per_device_train_batch_size"},
    "config.no-do-train": {"do_train": False},
    "config.no-precision": {"bf16": False},
    "config.fp16-dpo": {"bf16": False, "fp16": True},
    "config.no-cutoff": {"without": "cutoff_len"},
    "config.packing-dpo": {"packing": True},
    "config.pref-ftx": {"pref_ftx": 0.1},
    "config.lora-dropout-dpo": {**LORA, "lora_dropout": 0.05},
    "config.pref-loss-ignored": {"pref_loss": "ipo"},
    "config.reference-ignored": {"pref_loss": "simpo", "ref_model": "x/y"},
    "config.many-checkpoints": {"save_total_limit": None},
    "config.quantization-not-applied": {**LORA, "quantization_bit": 4, "quantization_method": "gptq"},
    "config.zero3-qlora": {**LORA, **Z3, "quantization_bit": 4},
    "config.badam-distributed": {"use_badam": True},
    "config.layerwise-distributed": {"use_apollo": True, "apollo_layerwise": True, "optim": "adamw_torch"},
    "config.lora-keys-full": {"lora_rank": 16},
    "config.pref-keys-stage": {"stage": "sft", "pref_beta": 0.2},
    "config.secret-in-file": {"hf_hub_token": "hf_abcdef"},
    "config.text-for-switch": {"overwrite_cache": "true"},
    "config.interpolation-unresolved": {"run_name": "${template}"},
    "config.deepspeed-location": Z3,
    "config.zero3-gather": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "config.offload-param-stage": {
        "deepspeed": {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    },
    "config.deepspeed-ignored-key": {"deepspeed": {"zero_optimisation": {}}},
    "config.deepspeed-batch": {"deepspeed": {"train_batch_size": 64}},
    "config.files-missing": {"ref_model": "/nowhere/at/all"},
}


def ids(path, *overrides, gpu=None, **environment):
    return {finding.id for finding in check_recipe(path, overrides, environment, gpu)}


def run(*arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


def test_a_good_recipe_has_no_findings(write):
    assert ids(write()) == set()


# The parser takes these; the run stops later.
STOPS = {
    "config.optim-of-block-optimizer": {"use_apollo": True, "optim": "adamw_torch_fused"},
    "config.own-optimizer-deepspeed": {"use_muon": True, **Z3},
    "config.shift-attn": {"shift_attn": True, "model_name_or_path": "meta-llama/Llama-3.1-8B"},
}


@pytest.mark.parametrize("id", STOPS)
def test_what_stops_a_run_after_its_parser_is_an_error(id, write):
    findings = check_recipe(write(**STOPS[id]), (), {})
    assert {finding.severity for finding in findings if finding.id == id} == {"error"}
    assert check_exit_code(findings) == 1


@pytest.mark.parametrize("id", SURPRISES)
def test_a_surprise_is_told_and_stops_nothing(id, write):
    findings = check_recipe(write(**SURPRISES[id]), (), {})
    assert id in {finding.id for finding in findings}
    assert check_exit_code(findings) == 0


def test_every_piece_of_advice_has_a_recipe_that_brings_it_up():
    assert {rule.id for rule in ADVICE} <= {*SURPRISES, *STOPS}


def test_findings_come_worst_first(write):
    severities = [
        finding.severity for finding in check_recipe(write(pref_ftx=0.1, bf16=False, infer_backend="vllm"), (), {})
    ]
    assert severities == ["error", "warning", "info"]


def test_a_finding_has_place_cause_and_fix(write):
    path = write(pure_bf16=True, **Z3)
    (finding,) = (finding for finding in check_recipe(path, (), {}) if finding.severity == "error")
    assert finding.id == "config.pure-bf16-zero3"
    assert re.fullmatch(rf"{re.escape(path)}:\d+", finding.evidence[0].where)
    assert (finding.cause, finding.fix) == (KINDS[finding.id].why, "Write bf16: true instead.")


class TestMachine:
    def test_checkpoints_in_the_output_folder_are_resumed_from(self, write):
        for step in (90, 100):
            Path(f"saves/none/checkpoint-{step}").mkdir(parents=True)
        (finding,) = check_recipe(write(), (), {})
        assert (finding.id, finding.title) == (
            "config.output-has-checkpoints",
            "output_dir holds checkpoint-100, and resumes from it",
        )
        assert ids(write(overwrite_output_dir=True)) == {"config.overwrite-output"}
        assert ids(write(resume_from_checkpoint="saves/none/checkpoint-90")) == set()

    def test_a_finished_model_in_the_output_folder_stops_the_run(self, write):
        Path("saves/none").mkdir(parents=True)
        Path("saves/none/model.safetensors.index.json").touch()
        findings = check_recipe(write(), (), {})
        assert [finding.id for finding in findings] == ["config.output-not-empty"]
        assert check_exit_code(findings) == 1

    def test_datasets_are_looked_up_where_their_list_is_at_hand(self, write):
        Path("data").mkdir()
        info = {"pairs": {"ranking": True}, "chats": {}}
        Path("data/dataset_info.json").write_text(json.dumps(info))
        assert ids(write(dataset="pairs")) == set()
        assert ids(write(dataset="pairs,chats")) == {"config.dataset-not-ranked"}
        assert ids(write(dataset="pears")) == {"config.dataset-unknown"}
        assert ids(write(stage="sft", dataset="chats")) == set()
        assert ids(write(stage="sft", dataset="pairs")) == {"config.dataset-not-ranked"}

    def test_bf16_is_told_on_cards_without_it(self, write):
        assert ids(write(), gpu=find_gpu("t4-16g")) == {"config.bf16-hardware"}
        assert ids(write(bf16=False, fp16=True), gpu=find_gpu("t4-16g")) == {"config.fp16-dpo"}
        assert ids(write(), gpu=find_gpu("a100-80g")) == set()

    def test_flash_attention_2_is_refused_on_cards_it_does_not_run_on(self, write):
        path = write(bf16=False, fp16=True, flash_attn="fa2")
        assert ids(path, gpu=find_gpu("v100-32g")) == {"config.flash-attn-hardware", "config.fp16-dpo"}
        assert check_exit_code(check_recipe(path, (), {}, find_gpu("v100-32g"))) == 1
        assert ids(path, gpu=find_gpu("rtx3090")) == {"config.fp16-dpo"}

    def test_allocator_settings_that_the_launcher_overwrites_are_told(self, write):
        conf = "max_split_size_mb:128"
        assert ids(write(), PYTORCH_CUDA_ALLOC_CONF=conf) == {"config.expandable-overwritten"}
        assert ids(write(), PYTORCH_CUDA_ALLOC_CONF=conf, OPTIM_TORCH="0") == set()
        assert ids(write(), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") == set()

    def test_json_recipes_and_spaces_in_paths_break_plain_llamafactory(self, write, tmp_path):
        path = tmp_path / "my recipe.json"
        path.write_text(
            json.dumps(
                {
                    "model_name_or_path": "x",
                    "stage": "dpo",
                    "do_train": True,
                    "dataset": "d",
                    "cutoff_len": 8,
                    "bf16": True,
                    "save_total_limit": 1,
                    "per_device_train_batch_size": 1,
                }
            )
        )
        assert ids(str(path)) == {"config.cli-json", "config.cli-spaces"}


class TestSecrets:
    SECRET = "hf_doNotPrintMe"

    def test_a_secret_is_never_printed(self, write, capsys):
        path = write(hf_hub_token=self.SECRET, swanlab_api_key=[self.SECRET], hub_token=self.SECRET, lora_rnk=1)
        for flags in ((), ("--json",)):
            _, out, err = run("check", path, *flags, capsys=capsys)
            assert self.SECRET not in out + err
        _, out, err = run("predict", path, "--gpu", "a100-80g", capsys=capsys)
        assert self.SECRET not in out + err

    def test_a_token_from_the_environment_is_not_a_secret_in_the_file(self, write):
        found = ids(write(hf_hub_token="${oc.env:HF_TOKEN}"), HF_TOKEN=self.SECRET)
        assert found == {"config.interpolation-unresolved"}


class TestCommand:
    @pytest.mark.parametrize(
        ("settings", "code"),
        [
            ({}, 0),
            ({"bf16": False}, 0),
            ({"pure_bf16": True, **Z3}, 1),
            ({"lora_rnk": 8}, 2),
            ({"cutoff_len": "4k"}, 2),
            ({"stage": "dop"}, 2),
            ({"deepspeed": "nowhere.json"}, 2),
            ({"without": "model_name_or_path"}, 2),
        ],
    )
    def test_exit_code_is_0_fine_1_refused_2_bad_input(self, settings, code, write, capsys):
        assert run("check", write(**settings), capsys=capsys)[0] == code

    def test_json_has_the_documented_shape(self, write, capsys):
        _, out, _ = run("check", write(bf16=False, pref_ftx=0.1), "--json", capsys=capsys)
        document = json.loads(out)
        assert document["schema"] == "dpofit.check/1"
        for finding in document["findings"]:
            assert set(finding) == {"id", "severity", "title", "evidence", "cause", "fix"}
            assert finding["id"] in KINDS
            assert [set(evidence) for evidence in finding["evidence"]] == [{"where", "text"}]

    def test_the_table_fits_100_columns(self, write, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "300")
        _, out, _ = run(
            "check", write(bf16=False, enable_liger_kernel=True, save_total_limit=None, **Z3), capsys=capsys
        )
        assert max(map(len, out.splitlines())) <= 100
        assert "config.no-precision" in out

    def test_a_missing_file_is_one_line_and_no_traceback(self, capsys):
        code, out, err = run("check", "nowhere.yaml", capsys=capsys)
        assert (code, out) == (2, "")
        assert err.splitlines() == [
            "error: nowhere.yaml: is neither a file nor a recipe of the catalogue. `dpofit list` shows all."
        ]


def test_the_document_of_ids_is_up_to_date():
    script = [sys.executable, str(ROOT / "scripts/render_checks.py"), "--check"]
    assert subprocess.run(script, capture_output=True, check=False).returncode == 0


def test_every_kind_is_used_somewhere():
    source = "\n".join(
        path.read_text() for path in (ROOT / "tools/dpofit/recipe").glob("*.py") if path.name != "kinds.py"
    )
    assert [id for id in KINDS if f'"{id}"' not in source] == []
