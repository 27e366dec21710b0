"""Writes recipes for the tests: a valid 7B dpo recipe with some keys changed, others left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

BASE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "stage": "dpo",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "dpo_en_demo",
    "template": "qwen",
    "cutoff_len": 4096,
    "per_device_train_batch_size": 1,
    "save_total_limit": 2,
    "bf16": True,
    "output_dir": "saves/none",
}


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No allocator settings from the machine; relative paths start in an empty folder."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OPTIM_TORCH", "ALLOW_EXTRA_ARGS"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes the recipe beside the working directory; its path as text; `without` names keys to leave out."""

    def write_recipe(without: str = "", **changes: Any) -> str:
        settings = {key: value for key, value in {**BASE, **changes}.items() if key not in without.split()}
        path = tmp_path / "my_dpo.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        return str(path)

    return write_recipe
