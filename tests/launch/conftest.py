"""A tiny model, made once for all runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launch.runs import ASSETS


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen2 with random weights and the shipped tokenizer."""
    transformers = pytest.importorskip("transformers")
    from dpofit.launch.smoke_model import tiny_config

    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(ASSETS / "tokenizer", folder)
    (folder / "config.json").write_text(json.dumps(tiny_config("Qwen/Qwen2.5-7B-Instruct", folder)))
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
