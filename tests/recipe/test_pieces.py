"""Long-context pieces: which are on, by precedence, and which recipes they can't work in."""

from pathlib import Path

import pytest
import yaml

from dpofit.errors import BadInput
from dpofit.recipe.cards import piece_reasons, read_presets
from dpofit.recipe.check import check_exit_code, check_recipe
from dpofit.recipe.load import load_recipe
from dpofit.recipe.long_context import PIECES, parse_pieces, with_option, written

ALL = ",".join(PIECES)


def pieces(path, variable=None, *overrides):
    environment = {} if variable is None else {"DPOFIT_LONG_CONTEXT": variable}
    return load_recipe(path, overrides, environment).recipe.long_context


@pytest.fixture
def run_folder(write, tmp_path):
    def make(dpofit_yaml: str, **changes) -> str:
        (tmp_path / "dpofit.yaml").write_text(dpofit_yaml)
        return write(**changes)

    return make


def test_there_are_five_pieces_and_each_has_a_knob_that_says_why():
    assert PIECES == ("answer_logps", "shared_prompt", "cached_reference", "tiled_mlp", "offload_checkpoints")
    assert set(piece_reasons(read_presets())) == set(PIECES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", set(PIECES)),
        ("off", set()),
        ("tiled_mlp", {"tiled_mlp"}),
        (" answer_logps , tiled_mlp,", {"answer_logps", "tiled_mlp"}),
    ],
)
def test_pieces_are_all_off_or_names(text, expected):
    assert parse_pieces(text, "command line", "--long-context") == expected


def test_every_unknown_piece_is_named_with_the_nearest():
    with pytest.raises(BadInput) as bad:
        parse_pieces("tiled-mlp,answer_logps,x", "command line", "--long-context")
    assert [str(problem).split(" There are:")[0] for problem in bad.value.problems] == [
        "command line: --long-context: 'tiled-mlp' is no piece. Did you mean tiled_mlp?",
        "command line: --long-context: 'x' is no piece.",
    ]


def test_what_is_written_is_read_back():
    for chosen in (PIECES, (), PIECES[2:4]):
        assert parse_pieces(written(chosen), "", "") == set(chosen)
    assert written({"tiled_mlp", "answer_logps"}) == "answer_logps,tiled_mlp"


def test_stock_unless_something_says_otherwise(write):
    assert pieces(write()) == set()


def test_the_environment_wins_over_dpofit_yaml(run_folder):
    path = run_folder("long_context:\n  answer_logps: true\n  tiled_mlp: false\n")
    assert pieces(path) == {"answer_logps"}
    assert pieces(path, "tiled_mlp") == {"tiled_mlp"}
    assert pieces(path, "off") == set()


def test_the_option_wins_over_the_environment():
    process = {"DPOFIT_LONG_CONTEXT": "tiled_mlp", "NCCL_DEBUG": "INFO"}
    assert with_option(process, None) == process
    assert with_option(process, "all") == {"DPOFIT_LONG_CONTEXT": ALL, "NCCL_DEBUG": "INFO"}
    assert with_option(process, "off")["DPOFIT_LONG_CONTEXT"] == "off"


def test_dpofit_yaml_may_name_only_pieces_and_switch_them_on_or_off(run_folder):
    path = run_folder("long_context:\n  answer_logp: true\n  tiled_mlp: 1\n")
    with pytest.raises(BadInput) as bad:
        pieces(path)
    wrong = [(problem.key, problem.wrong) for problem in bad.value.problems]
    assert wrong == [
        ("long_context", "'answer_logp' is no piece"),
        ("long_context.tiled_mlp", "is not true or false"),
    ]
    with pytest.raises(BadInput, match="is not a mapping"):
        pieces(run_folder("long_context: all\n"))


def test_the_variable_has_its_own_place_in_dpofit_yaml(run_folder):
    with pytest.raises(BadInput, match="Write pieces under long_context"):
        pieces(run_folder("env:\n  DPOFIT_LONG_CONTEXT: all\n"))


def test_an_unknown_piece_in_the_environment_is_bad_input(write):
    with pytest.raises(BadInput, match="environment: DPOFIT_LONG_CONTEXT: 'al' is no piece"):
        pieces(write(), "al")


@pytest.mark.parametrize(
    ("piece", "settings", "told"),
    [
        ("shared_prompt", {"per_device_train_batch_size": 2}, "per_device_train_batch_size is 2; shared_prompt takes"),
        (
            "shared_prompt",
            {"eval_strategy": "steps", "val_size": 0.1},
            "per_device_eval_batch_size is 8; shared_prompt takes one pair at a time",
        ),
        ("shared_prompt", {"packing": True}, "packing is on; shared_prompt lays out rows itself"),
        ("shared_prompt", {"flash_attn": "disabled"}, "flash_attn is disabled (eager attention)"),
        ("shared_prompt", {"stage": "sft"}, "stage is sft; shared_prompt needs pairs"),
        ("answer_logps", {"stage": "rm"}, "stage is rm; answer_logps is for dpo, kto and sft"),
        ("answer_logps", {"stage": "sft", "use_dft_loss": True}, "use_dft_loss is on; it reads the logits that"),
        ("answer_logps", {"stage": "sft", "label_smoothing_factor": 0.1}, "label_smoothing_factor is on; it reads"),
        (
            "answer_logps",
            {"finetuning_type": "lora", "lora_target": "q_proj,lm_head"},
            "lora_target names lm_head; answer_logps needs a plain head",
        ),
        ("cached_reference", {"pref_loss": "simpo"}, "stage is dpo with pref_loss simpo, which has no reference"),
        ("cached_reference", {"stage": "sft"}, "stage is sft, which has no reference"),
        ("offload_checkpoints", {"use_unsloth_gc": True}, "use_unsloth_gc is on beside offload_checkpoints"),
        ("offload_checkpoints", {"disable_gradient_checkpointing": True}, "leaves offload_checkpoints nothing to move"),
        ("offload_checkpoints", {"use_reentrant_gc": False}, "use_reentrant_gc is off; offload_checkpoints is exact"),
        (
            "cached_reference",
            {"streaming": True, "max_steps": 9},
            "streaming is on; cached_reference must see the whole",
        ),
        ("shared_prompt", {"flash_attn": "fa3"}, "flash_attn is fa3; shared_prompt knows sdpa and fa2"),
        ("shared_prompt", {"rope_scaling": "dynamic"}, "rope_scaling is dynamic; shared_prompt needs positions"),
        (
            "tiled_mlp",
            {"stage": "sft", "finetuning_type": "lora", "lora_dropout": 0.1},
            "lora_dropout is 0.1; tiled_mlp can't repeat a dropout",
        ),
        ("tiled_mlp", {"use_unsloth": True}, "use_unsloth is on with tiled_mlp"),
    ],
)
def test_a_piece_that_cannot_work_is_told_and_stops_the_run(piece, settings, told, write):
    path = write(**settings)
    findings = [f for f in check_recipe(path, (), {"DPOFIT_LONG_CONTEXT": piece}) if f.id == "config.long-context"]
    assert len(findings) == 1 and told in findings[0].title
    assert check_exit_code(findings) == 1
    with pytest.raises(BadInput, match=piece):
        pieces(path, piece)


def test_every_piece_works_in_a_plain_dpo_recipe(write):
    assert pieces(write(), "all") == set(PIECES)


def test_kto_has_a_reference_to_cache_whatever_its_pref_loss(write):
    assert pieces(write(stage="kto"), "answer_logps,cached_reference") == {"answer_logps", "cached_reference"}
    assert pieces(write(stage="kto", pref_loss="orpo"), "cached_reference") == {"cached_reference"}


def test_check_says_that_llamafactory_cli_runs_stock(write):
    found = check_recipe(write(), (), {"DPOFIT_LONG_CONTEXT": "tiled_mlp"})
    assert [(finding.id, finding.severity) for finding in found] == [("config.long-context-stock", "info")]


def test_a_copied_recipe_says_of_each_piece_whether_it_is_on_and_why(tmp_path: Path):
    from dpofit.recipe.load import read_recipe, resolve_reference
    from dpofit.recipe.run_folder import run_folder_files

    name = "qwen2.5-72b-dpo/full-z3"
    text = run_folder_files(read_recipe(name), resolve_reference(name), tmp_path)["dpofit.yaml"]
    assert yaml.safe_load(text)["long_context"] == dict.fromkeys(PIECES, False)
    assert "  # One row [prompt, chosen, rejected] a pair" in text
