"""LLaMA-Factory's own parser takes every recipe, and dpofit's loader reads the same from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpofit.recipe.cards import card_of
from dpofit.recipe.catalogue import catalogue_root, recipe_files

pytestmark = pytest.mark.stack

FILES = {file.full_name: file.path for file in recipe_files()}
every_recipe = pytest.mark.parametrize("name", FILES)

# Fields that LLaMA-Factory's parser and Recipe both have, under Recipe's names.
SHARED = [
    "model",
    "stage",
    "finetuning",
    "micro_batch",
    "eval_micro_batch",
    "gradient_accumulation",
    "cutoff_len",
    "evaluates",
    "packing",
    "neat_packing",
    "pref_loss",
    "pref_ftx",
    "ld_alpha",
    "ref_model",
    "lora_rank",
    "lora_target",
    "lora_dropout",
    "additional_target",
    "use_dora",
    "quantization_bit",
    "quantization_method",
    "quantization_type",
    "double_quantization",
    "bf16",
    "fp16",
    "pure_bf16",
    "upcast_layernorm",
    "upcast_lmhead_output",
    "gradient_checkpointing",
    "use_reentrant_gc",
    "use_unsloth",
    "use_unsloth_gc",
    "liger",
    "flash_attn",
    "optim",
    "torch_empty_cache_steps",
    "save_only_model",
    "save_total_limit",
    "saves",
]


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, Any]]:
    """Recipe name → what the parser made of it; one process for all, importing LLaMA-Factory is what takes long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cards = {name: card_of(path) for name, path in FILES.items()}
    world_sizes = {str(FILES[name]): card.hardware.world_size for name, card in cards.items() if card}
    script = Path(__file__).with_name("parse_with_llamafactory.py")
    done = subprocess.run(
        [sys.executable, str(script), str(port), json.dumps(world_sizes)],
        cwd=catalogue_root(),  # where `deepspeed: deepspeed/z3.json` leads somewhere
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    by_file = json.loads(done.stdout)
    return {name: by_file[str(path)] for name, path in FILES.items()}


def test_there_are_recipes_to_parse() -> None:
    assert len(FILES) >= 21


@every_recipe
def test_the_parser_accepts_it(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    assert "refused" not in parsed[name], parsed[name].get("refused")


@every_recipe
def test_it_is_distributed_when_written_for_several_gpus(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    card = card_of(FILES[name])
    assert card is not None
    assert parsed[name]["parallel_mode"] == ("distributed" if card.hardware.world_size > 1 else "not_parallel")


@every_recipe
def test_only_orpo_and_simpo_do_without_a_reference(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    assert parsed[name]["use_ref_model"] == (parsed[name]["pref_loss"] not in ("orpo", "simpo"))


@every_recipe
def test_the_loader_reads_what_the_parser_reads(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    from dpofit.recipe.load import load_recipe

    recipe = load_recipe(name, environment={}).recipe
    ours = {field: getattr(recipe, field) for field in SHARED}
    assert json.loads(json.dumps(ours)) == {field: parsed[name][field] for field in SHARED}
    zero = recipe.zero and {
        "stage": recipe.zero.stage,
        "offload_optimizer": recipe.zero.offload_optimizer,
        "offload_param": recipe.zero.offload_param,
    }
    assert zero == parsed[name]["zero"]


@every_recipe
def test_the_loader_reads_the_allocator_setting_from_the_card(name: str) -> None:
    from dpofit.recipe.load import load_recipe

    recipe = load_recipe(name, environment={}).recipe
    assert recipe.expandable_segments is ("no-expandable" not in name)
