"""`diff` compares what two recipes mean, not how they are written."""

import json

import pytest

from dpofit.cli.app import main
from dpofit.recipe.diff import differences, read_side


@pytest.fixture
def difference(write):
    """Rows (section, key, left, right) between a recipe with overrides and the same with others."""

    def rows(left, right, left_environment=(), right_environment=(), **settings):
        path = write(**settings)
        sides = (read_side(path, left, dict(left_environment)), read_side(path, right, dict(right_environment)))
        return [(row.section, row.key, row.left, row.right) for row in differences(*sides)]

    return rows


def test_the_same_meaning_is_no_difference(difference):
    assert difference(["lora_target=a,b", "pref_ftx=0", "lora_rank=8"], ["lora_target=[a, b]", "pref_ftx=0.0"]) == []


def test_a_default_stands_in_for_an_absent_key(difference):
    assert difference([], ["lora_rank=16", "use_unsloth_gc=true"]) == [
        ("settings", "lora_rank", 8, 16),
        ("settings", "use_unsloth_gc", False, True),
    ]


def test_deepspeed_configs_are_compared_by_content_with_deepspeeds_defaults(difference):
    assert difference(
        ["deepspeed=examples/deepspeed/ds_z3_config.json"], ["deepspeed=examples/deepspeed/ds_z3_offload_config.json"]
    )[1:] == [
        ("deepspeed", "zero_optimization.offload_optimizer.device", "none", "cpu"),
        ("deepspeed", "zero_optimization.offload_optimizer.pin_memory", False, True),
        ("deepspeed", "zero_optimization.offload_param.device", "none", "cpu"),
        ("deepspeed", "zero_optimization.offload_param.pin_memory", False, True),
    ]


def test_the_environment_is_compared(difference):
    assert difference([], [], right_environment={"NCCL_DEBUG": "INFO", "HOME": "/x"}) == [
        ("environment", "NCCL_DEBUG", None, "INFO"),
    ]


def test_secrets_are_masked(difference):
    assert difference([], ["hub_token=abc"]) == [("settings", "hub_token", None, "********")]


def test_overrides_belong_to_the_recipe_they_follow(write, capsys):
    path = write()
    main_exit(["diff", path, "cutoff_len=1024", path, "cutoff_len=8192", "lora_rank=16", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dpofit.diff/1"
    assert [(row["key"], row["left"], row["right"]) for row in document["differences"]] == [
        ("cutoff_len", 1024, 8192),
        ("lora_rank", 8, 16),
    ]
    assert [(row["left_given"], row["right_given"]) for row in document["differences"]] == [(True, True), (False, True)]


def test_the_table_fits_100_columns_and_brackets_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main_exit(["diff", "qwen2.5-72b-dpo/full-z3", "qwen2.5-72b-dpo/full-z3-offload-liger-unsloth-gc"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "[none]" in out


@pytest.mark.parametrize("count", [1, 3])
def test_anything_but_two_recipes_is_bad_input(write, count, capsys):
    assert main_exit(["diff", *[write()] * count]) == 2
    assert f"{count} recipes given" in capsys.readouterr().err


def main_exit(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code or 0
