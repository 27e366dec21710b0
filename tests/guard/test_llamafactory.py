"""LLaMA-Factory's own workflows under the guard, callbacks and all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpofit.train.guard import folders
from dpofit.train.guard.check import check_checkpoint
from dpofit.train.guard.manifest import looks_whole
from tests.guard.ranks import run_ranks, values
from tests.guard.runs import Run, deepspeed_config

pytestmark = pytest.mark.stack

PAIRS = "smoke_pairs"
ASSETS = Path(__file__).parents[2] / "tools" / "dpofit" / "launch" / "smoke_assets"


def run_exp(folder: str, arguments: dict[str, Any]) -> None:
    """One LLaMA-Factory run of a tiny Qwen2 made on the spot, guarded by the one import that a script needs."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    import dpofit.train.guard.auto  # noqa: F401
    from tests.guard import stack  # noqa: F401

    mine = Path(folder) / os.environ["RANK"]
    base = mine / "base"
    config = Qwen2Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(base)
    AutoTokenizer.from_pretrained(ASSETS / "tokenizer").save_pretrained(base)
    shutil.copytree(ASSETS, mine / "data")
    from llamafactory.train.tuner import run_exp as stock_run_exp

    stock_run_exp(
        {
            "model_name_or_path": str(base), "dataset_dir": str(mine / "data"),
            "template": "empty", "cutoff_len": 64, "do_train": True, "output_dir": f"{folder}/out",
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 2, "save_steps": 1,
            "bf16": True, "deepspeed": deepspeed_config(Run("")), "report_to": "none", "logging_steps": 1,
            "preprocessing_num_workers": 1, "dataloader_num_workers": 0, **arguments,
        }
    )  # fmt: skip


def errors(folder: Path) -> list[str]:
    return [f"{finding.id}: {finding.evidence}" for finding in check_checkpoint(folder) if finding.severity == "error"]


def test_dpo_with_lora_saves_whole_adapters_and_a_whole_final_model(tmp_path: Path) -> None:
    arguments = {"stage": "dpo", "finetuning_type": "lora", "lora_rank": 4, "dataset": PAIRS}
    values(run_ranks(run_exp, 2, str(tmp_path), arguments))
    out = tmp_path / "out"
    for folder in (out / "checkpoint-1", out / "checkpoint-2", out):
        assert looks_whole(folder), folder
        assert errors(folder) == []
        assert (folder / "adapter_model.safetensors").exists()
    rows = [json.loads(line) for line in (out / "dpofit" / "saves.jsonl").read_text().splitlines()]
    assert [row["backend"] for row in rows] == ["direct"] * 3


def test_reward_models_whose_weights_a_callback_rewrites_stay_whole(tmp_path: Path) -> None:
    arguments = {"stage": "rm", "finetuning_type": "full", "dataset": PAIRS}
    values(run_ranks(run_exp, 2, str(tmp_path), arguments))
    out = tmp_path / "out"
    for _, folder in folders.checkpoints(out):
        assert looks_whole(folder), folder
        assert errors(folder) == []
        assert (folder / "value_head.safetensors").exists()
    assert errors(out) == []
