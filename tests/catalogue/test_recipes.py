"""What is true of every recipe file, found by walking the folder rather than by list."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dpofit.recipe.cards import card_of, read_family_card, read_presets
from dpofit.recipe.catalogue import catalogue_root

RECIPES = catalogue_root() / "recipes"
FILES = sorted(path for path in RECIPES.rglob("*.y*ml") if path.name not in ("card.yaml", "presets.yaml"))
every_recipe = pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")


def settings_of(file: Path) -> dict[str, object]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def comment_of(file: Path, key: str) -> str:
    match = re.search(rf"^{key}: [^#\n]*# (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"{key} has no comment"
    return match[1]


def test_the_walk_finds_the_recipes() -> None:
    assert len(FILES) >= 21


@every_recipe
def test_every_file_has_a_card_entry_that_speaks_of_its_version(file: Path) -> None:
    card = card_of(file)
    assert card is not None
    assert int(file.stem.rpartition(".v")[2]) in card.versions


@every_recipe
def test_output_dir_holds_family_recipe_and_version(file: Path) -> None:
    assert settings_of(file)["output_dir"] == f"saves/{file.parent.name}/{file.stem}"


@every_recipe
def test_the_batch_arithmetic_in_the_comment_is_right(file: Path) -> None:
    card = card_of(file)
    assert card is not None
    settings = settings_of(file)
    found = re.match(
        r"(\d+) a GPU x (\d+) x (\d+) GPUs = (\d+) pairs an update;", comment_of(file, "gradient_accumulation_steps")
    )
    assert found
    micro_batch, accumulation, gpus, pairs = map(int, found.groups())
    assert micro_batch == settings["per_device_train_batch_size"]
    assert accumulation == settings["gradient_accumulation_steps"]
    assert gpus == card.hardware.nodes * card.hardware.gpus_per_node
    assert pairs == micro_batch * accumulation * gpus


@every_recipe
def test_the_length_arithmetic_in_the_comment_is_right(file: Path) -> None:
    found = re.match(r"prompt ([\d,]+) \+ answer ([\d,]+) = ([\d,]+) tokens", comment_of(file, "cutoff_len"))
    assert found
    prompt, answer, total = (int(number.replace(",", "")) for number in found.groups())
    assert prompt + answer == total == settings_of(file)["cutoff_len"]


@every_recipe
def test_a_documented_limit_and_its_1k_answers_fit_the_cutoff(file: Path) -> None:
    card = card_of(file)
    assert card is not None
    if card.documented:
        assert settings_of(file)["cutoff_len"] == card.documented.prompt_tokens + 1024


# Keys of LLaMA-Factory that move memory; each must say which way, or that it does not.
MEMORY_KEYS = [
    "finetuning_type",
    "lora_rank",
    "lora_alpha",
    "lora_target",
    "quantization_bit",
    "double_quantization",
    "pref_loss",
    "deepspeed",
    "cutoff_len",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "bf16",
    "disable_gradient_checkpointing",
    "gradient_checkpointing",
    "use_unsloth_gc",
    "enable_liger_kernel",
    "flash_attn",
    "optim",
    "preprocessing_num_workers",
    "dataloader_num_workers",
    "gradient_accumulation_steps",
    "save_total_limit",
    "save_only_model",
]


@every_recipe
def test_every_memory_knob_says_which_way_it_moves_memory(file: Path) -> None:
    for key in settings_of(file).keys() & set(MEMORY_KEYS):
        comment = comment_of(file, key)
        moves = re.search(r"uses? (far )?(more|less)", comment)
        assert moves or "no effect on memory" in comment or "changes nothing" in comment, key


@every_recipe
def test_the_deepspeed_config_is_one_we_ship(file: Path) -> None:
    config = settings_of(file).get("deepspeed")
    assert config is None or (catalogue_root() / str(config)).is_file()


@every_recipe
def test_the_header_names_the_file_and_its_environment(file: Path) -> None:
    from dpofit.recipe.catalogue import card_environment

    header = file.read_text(encoding="utf-8").split("\n\n")[0]
    assert header.startswith(f"# {file.parent.name}/{file.stem}\n")
    assert set(re.findall(r"^#   (\w+=\S+)$", header, re.MULTILINE)) == {
        f"{name}={value}" for name, value in card_environment(file).items()
    }


def test_knob_recipes_differ_from_full_z3_in_their_knob_alone() -> None:
    base = settings_of(RECIPES / "qwen2.5-72b-dpo/full-z3.v1.yaml")
    expected = {
        "liger": {"enable_liger_kernel"},
        "unsloth-gc": {"use_unsloth_gc"},
        "gc-flag": {"gradient_checkpointing"},
        "no-gc": {"disable_gradient_checkpointing"},
        "offload-optimizer": {"deepspeed"},
        "offload": {"deepspeed"},
        "no-expandable": set(),  # environment alone
    }
    for knob, keys in expected.items():
        other = settings_of(RECIPES / f"qwen2.5-72b-dpo/full-z3-{knob}.v1.yaml")
        differing = {key for key in base.keys() | other.keys() if base.get(key) != other.get(key)}
        assert differing - {"output_dir"} == keys, knob


def test_every_preset_and_every_knob_is_used_by_a_recipe() -> None:
    presets = read_presets()
    used = {card.preset for path in RECIPES.glob("*/card.yaml") for card in read_family_card(path).recipes.values()}
    assert used == presets.presets.keys()
    assert {knob for preset in used for knob in presets.presets[preset].knobs} == presets.knobs.keys()


@every_recipe
def test_the_cluster_it_is_written_for_is_one_dpofit_knows(file: Path) -> None:
    from dpofit.hardware.gpus import gpu_names

    card = card_of(file)
    assert card is not None
    assert card.hardware.gpu in gpu_names()


@pytest.mark.parametrize(
    ("ours", "example"),
    [
        ("z2", "ds_z2_config.json"),
        ("z2_offload", "ds_z2_offload_config.json"),
        ("z3", "ds_z3_config.json"),
        ("z3_offload", "ds_z3_offload_config.json"),
    ],
)
def test_a_deepspeed_config_is_llamafactorys_example(ours: str, example: str) -> None:
    from dpofit.recipe.deepspeed_examples import EXAMPLES

    assert json.loads((catalogue_root() / f"deepspeed/{ours}.json").read_text()) == EXAMPLES[example]


def test_optimizer_offload_is_z3_offload_with_the_weights_left_on_the_gpu() -> None:
    optimizer_only, both = (
        json.loads((catalogue_root() / f"deepspeed/{name}.json").read_text())
        for name in ("z3_offload_optimizer", "z3_offload")
    )
    del both["zero_optimization"]["offload_param"]
    assert optimizer_only == both
