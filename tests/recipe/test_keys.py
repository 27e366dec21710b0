"""keys.json is what the pinned packages say, and every key is known to matter or not to matter to memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from dpofit.recipe.keys import known_keys, nearest, out_of_range, wrong_choice, wrong_type
from dpofit.recipe.memory_keys import HARMLESS, OWNED_BY, TYPED
from dpofit.recipe.retired import RETIRED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.stack
def test_keys_json_is_what_the_pinned_packages_say():
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts/export_keys.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-500:]


def test_typed_and_harmless_keys_are_known_and_never_both():
    harmless = [key for keys in HARMLESS.values() for key in keys.split()]
    assert len(harmless) == len(set(harmless))
    assert not TYPED & set(harmless)
    assert TYPED | set(harmless) <= set(known_keys())


def test_every_owned_group_exists_and_its_owner_counts_as_memory():
    harmless = {key for keys in HARMLESS.values() for key in keys.split()}
    for prefix, owner in OWNED_BY.items():
        assert any(key.startswith(prefix) for key in known_keys()), prefix
        assert not owner or (owner in known_keys() and owner not in harmless), owner


def test_retired_keys_are_gone_and_their_replacements_exist():
    assert not set(RETIRED) & set(known_keys())
    assert {new for new in RETIRED.values() if new} <= set(known_keys())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bf16", True),
        ("bf16", 1),
        ("bf16", None),
        ("bf16", "true"),
        ("max_steps", -1),
        ("learning_rate", 1),
        ("learning_rate", 1e-6),
        ("val_size", 0.1),
        ("val_size", 5),
        ("dataset", ["a", "b"]),
        ("dataset", "a,b"),
        ("deepspeed", "x.json"),
        ("deepspeed", {"a": 1}),
        ("deepspeed", None),
        ("report_to", ["none"]),
        ("packing", None),
        ("resume_from_checkpoint", True),
        ("dataset_dir", {"a": {}}),
        ("warmup_steps", 0.1),
        ("lora_target", ["q_proj"]),
        ("include_num_input_tokens_seen", True),
        ("gradient_checkpointing_kwargs", {"use_reentrant": False}),
    ],
)
def test_values_llamafactory_can_use_are_accepted(key, value):
    assert wrong_type(known_keys()[key], value) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bf16", "false"),
        ("bf16", ""),
        ("bf16", 2),
        ("max_steps", 1.5),
        ("max_steps", "5"),
        ("learning_rate", "1e-6"),
        ("learning_rate", True),
        ("cutoff_len", None),
        ("cutoff_len", "4k"),
        ("model_name_or_path", 7),
        ("output_dir", ["a"]),
        ("adapter_name_or_path", ["a"]),
        ("stage", None),
        ("eval_strategy", False),
        ("lora_rank", {"a": 1}),
        ("per_device_train_batch_size", 1.0),
        ("deepspeed", 3),
        ("quantization_bit", True),
    ],
)
def test_values_that_fail_or_mean_something_else_are_refused(key, value):
    assert wrong_type(known_keys()[key], value) is not None


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("per_device_train_batch_size", 0, True),
        ("gradient_accumulation_steps", -1, True),
        ("cutoff_len", 0, True),
        ("learning_rate", float("nan"), True),
        ("save_steps", float("inf"), True),
        ("max_grad_norm", float("inf"), False),
        ("max_steps", -1, False),
        ("learning_rate", 0, False),
    ],
)
def test_numbers_no_run_can_use_are_refused(key, value, refused):
    assert (out_of_range(known_keys()[key], value) is not None) is refused


def test_a_template_that_llamafactory_has_not_is_a_wrong_choice():
    template = known_keys()["template"]
    assert wrong_choice(template, "qwen3_nothink") is None
    assert wrong_choice(template, "qwen25") == ("is 'qwen25'", "Did you mean qwen?")
    right = wrong_choice(template, "house style of ours")[1]
    assert right.startswith("Choose one of aeva, alpaca,") and right.endswith("yuan, zephyr.")


def test_a_wrong_choice_names_the_nearest_and_all():
    assert wrong_choice(known_keys()["pref_loss"], "sigmod") == (
        "is 'sigmod'",
        "Did you mean sigmoid? Choose one of sigmoid, hinge, ipo, kto_pair, orpo, simpo.",
    )


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("lora_ranks", "lora_rank"),
        ("cut_off_len", "cutoff_len"),
        ("per_device_batch_size", "per_device_eval_batch_size"),
        ("enable_liger", "enable_liger_kernel"),
        ("Bf16", "bf16"),
        ("quantisation_bit", "quantization_bit"),
        ("xyzzy", None),
    ],
)
def test_the_nearest_known_key_is_named(typo, meant):
    assert nearest(typo, list(known_keys())) == meant
