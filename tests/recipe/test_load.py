"""A recipe loads as LLaMA-Factory's parser would leave it, or says everything that is wrong with it."""

import json
import time
from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.recipe.load import load_recipe


def load(path, *overrides, **environment):
    return load_recipe(path, overrides, environment).recipe


def problems(path, *overrides):
    with pytest.raises(BadInput) as bad:
        load_recipe(path, overrides, {})
    return [str(problem) for problem in bad.value.problems]


def test_absent_keys_have_llamafactorys_defaults(write):
    recipe = load(write(without="per_device_train_batch_size cutoff_len bf16 stage finetuning_type"))
    assert (recipe.micro_batch, recipe.eval_micro_batch, recipe.gradient_accumulation) == (8, 8, 1)
    assert (recipe.stage, recipe.finetuning, recipe.cutoff_len) == ("sft", "lora", 2048)
    assert (recipe.bf16, recipe.fp16, recipe.pure_bf16) == (False, False, False)
    assert (recipe.lora_rank, recipe.lora_target, recipe.optim) == (8, ("all",), "adamw_torch_fused")
    assert (recipe.gradient_checkpointing, recipe.use_reentrant_gc, recipe.flash_attn) == (True, True, "auto")
    assert (recipe.saves, recipe.save_total_limit, recipe.zero, recipe.unmodelled) == (True, 2, None, ())


def test_overrides_win_over_the_file(write):
    recipe = load(
        write(), "cutoff_len=16384", "lora_target=[q_proj,v_proj]", "finetuning_type=lora", "learning_rate=1e-6"
    )
    assert (recipe.cutoff_len, recipe.lora_target) == (16384, ("q_proj", "v_proj"))
    assert recipe.settings["learning_rate"] == 1e-6


def test_a_null_override_empties_a_key(write):
    assert load(write(save_total_limit=5), "save_total_limit=null").save_total_limit is None


def test_comma_lists_and_yaml_lists_mean_the_same(write):
    lists = load(write(finetuning_type="lora", lora_target=["q_proj", "v_proj"], additional_target=["lm_head"]))
    commas = load(write(finetuning_type="lora", lora_target="q_proj, v_proj", additional_target="lm_head"))
    assert lists.lora_target == commas.lora_target == ("q_proj", "v_proj")
    assert lists.additional_target == commas.additional_target == ("lm_head",)


@pytest.mark.parametrize(
    ("settings", "evaluates"),
    [
        ({}, False),
        ({"do_eval": True, "val_size": 0.1}, True),
        ({"eval_strategy": "steps", "eval_dataset": "e"}, True),
        # llamafactory 0.9.5 train/dpo/workflow.py 101: data alone is never evaluated
        ({"val_size": 0.1}, False),
        ({"eval_dataset": "e"}, False),
    ],
)
def test_evaluation_happens_when_asked_for_not_when_data_is_there(write, settings, evaluates):
    assert load(write(**settings)).evaluates is evaluates


@pytest.mark.parametrize(
    ("settings", "expected"),  # (on, reentrant, offloaded)
    [
        ({}, (True, True, False)),
        ({"gradient_checkpointing": True}, (True, True, False)),
        ({"gradient_checkpointing": False}, (True, True, False)),
        ({"disable_gradient_checkpointing": True}, (False, True, False)),
        ({"use_unsloth_gc": True}, (True, True, True)),
        ({"use_unsloth_gc": True, "disable_gradient_checkpointing": True}, (False, True, False)),
        ({"use_reentrant_gc": False}, (True, False, False)),
        ({"use_reentrant_gc": False, "gradient_checkpointing": True}, (True, True, False)),
        ({"disable_gradient_checkpointing": True, "gradient_checkpointing": True}, (True, False, False)),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            (True, False, False),
        ),
    ],
)
def test_gradient_checkpointing_is_what_both_libraries_leave(write, settings, expected):
    recipe = load(write(**settings))
    assert (recipe.gradient_checkpointing, recipe.use_reentrant_gc, recipe.use_unsloth_gc) == expected


def test_keys_that_may_change_memory_and_are_not_modelled_are_listed(write):
    recipe = load(write(neftune_noise_alpha=5, torch_compile=True, learning_rate=1e-6, logging_steps=5))
    assert recipe.unmodelled == ("neftune_noise_alpha", "torch_compile")


def test_an_unmodelled_key_at_its_default_is_not_listed(write):
    assert load(write(use_muon=False, neftune_noise_alpha=None, shift_attn=False)).unmodelled == ()


def test_every_problem_is_reported_at_once_with_its_line_and_remedy(write):
    path = write(
        lora_rnk=8, stage="dop", bf16="false", max_samples=1000.5, cutoff_len=None, evaluation_strategy="steps"
    )
    lines = Path(path).read_text().splitlines()
    line = {row.partition(":")[0]: number for number, row in enumerate(lines, start=1)}
    assert problems(path) == [
        f"{path}:{line['stage']}: stage: is 'dop'. Did you mean dpo? Choose one of pt, sft, rm, ppo, dpo, kto.",
        f"{path}:{line['cutoff_len']}: cutoff_len: is null. Give a whole number, or remove the key.",
        f"{path}:{line['bf16']}: bf16: is the text 'false', which LLaMA-Factory takes for true. "
        "Write true or false without quotes.",
        f"{path}:{line['lora_rnk']}: lora_rnk: is not a key of LLaMA-Factory 0.9.5. Did you mean lora_rank?",
        f"{path}:{line['max_samples']}: max_samples: is 1000.5. Give a whole number.",
        f"{path}:{line['evaluation_strategy']}: evaluation_strategy: is not a key of LLaMA-Factory 0.9.5. "
        "It was renamed: write eval_strategy.",
    ]


@pytest.mark.parametrize(
    "argument, suggestion",
    [("cutoff_len", "cutoff_len=VALUE"), ("cutoff_len 8", "cutoff_len=8"), ("=8", "cutoff_len=VALUE")],
)
def test_what_is_no_override_is_told_how_to_write_one(write, argument, suggestion):
    assert problems(write(), argument) == [
        f"command line: {argument}: is not an override. Write KEY=VALUE, such as {suggestion}."
    ]


def test_a_bad_override_is_told_as_the_command_line(write):
    assert problems(write(), "lora_rnk=8") == [
        "command line: lora_rnk: is not a key of LLaMA-Factory 0.9.5. Did you mean lora_rank?"
    ]


def test_bare_no_is_told_as_the_false_that_yaml_makes_of_it(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model_name_or_path: x\nsave_strategy: no\n")
    assert problems(str(path)) == [
        f'{path}:2: save_strategy: YAML reads the bare word no as false. Write "no" in quotes.'
    ]


def test_every_duplicate_key_is_told_with_both_lines(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("stage: dpo\nbf16: true\nstage: sft\nbf16: false\n")
    assert problems(str(path)) == [
        f"{path}:3: stage: appears twice (first on line 1). Keep one of the two.",
        f"{path}:4: bf16: appears twice (first on line 2). Keep one of the two.",
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"a: [1\n",
        b"\xff\xfe\x00",
        b"- 1\n- 2\n",
        b"just text\n",
        b"a: &a [*a]\n",
        b"{" * 400,
        b"\x00",
        b"a: !!python/object/apply:os.system [ls]\n",
    ],
)
def test_garbage_is_bad_input(tmp_path, content):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(BadInput):
        load_recipe(str(path), (), {})


def test_an_alias_bomb_is_refused_quickly(tmp_path):
    path = tmp_path / "bomb.yaml"
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)
    ]
    path.write_text("\n".join(rows))
    started = time.perf_counter()
    assert "more than 10,000 values" in problems(str(path))[0]
    assert time.perf_counter() - started < 1


def test_an_unknown_name_lists_the_nearest_recipe():
    assert "Did you mean full-z3-offload?" in problems("full-z3-ofload")[0]


def test_a_catalogue_name_loads_with_the_environment_of_its_card():
    recipe = load("qwen2.5-72b-dpo/full-z3")
    assert recipe.name == "qwen2.5-72b-dpo/full-z3.v1"
    assert recipe.expandable_segments is True


def test_a_json_recipe_loads_as_the_yaml_does(write, tmp_path):
    yaml_recipe = load(write())
    path = tmp_path / "my_dpo.json"
    path.write_text(json.dumps(dict(yaml_recipe.settings), indent=1))
    assert load(str(path)).settings == yaml_recipe.settings


def test_a_path_with_spaces_loads(write, tmp_path):
    folder = tmp_path / "my recipes"
    folder.mkdir()
    Path(write()).rename(folder / "r.yaml")
    assert load(str(folder / "r.yaml")).stage == "dpo"


def test_a_run_folder_stands_for_its_recipe(write, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    Path(write()).rename(folder / "recipe.yaml")
    assert load(str(folder)).name == "run"


def test_interpolations_resolve_with_a_note(write):
    loaded = load_recipe(write(output_dir="saves/${template}/${oc.env:RUN,first}"), (), {"RUN": "7"})
    assert loaded.recipe.settings["output_dir"] == "saves/qwen/7"
    assert [note.id for note in loaded.notes] == ["interpolation-resolved"]


def test_allow_extra_args_drops_unknown_keys_as_llamafactory_does(write):
    assert "nonsense" not in load(write(nonsense=3), ALLOW_EXTRA_ARGS="1").settings


def test_popular_switches_that_do_nothing_are_noted(write):
    loaded = load_recipe(write(enable_liger_kernel=True, gradient_checkpointing=True, val_size=0.1), (), {})
    assert [note.id for note in loaded.notes] == [
        "liger-no-fused-loss",
        "gradient-checkpointing-already-on",
        "eval-data-unused",
    ]


def test_loading_takes_under_50_ms(write):
    path = write(deepspeed="examples/deepspeed/ds_z3_config.json")
    load(path)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        load(path)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.05
