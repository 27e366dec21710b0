"""Runs LLaMA-Factory's own loading, converting and tokenizing on a folder of files, as training would."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True)
class Outcome:
    """`error` is what stopped the run, "" if nothing did; `rows` the tokenized pairs that training would see."""

    error: str
    rows: list[dict[str, Any]]


@cache
def _tokenizer(folder: str, template: str):
    from llamafactory.data.template import TEMPLATES
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    TEMPLATES[template].fix_special_tokens(tokenizer)
    return tokenizer, TEMPLATES[template]


def train_rows(
    folder: Path, info: dict[str, Any], model: Path, cutoff_len: int = 2048, template: str = "qwen"
) -> Outcome:
    """The data set `d` of `folder`, whose dataset_info.json is written here, through get_dataset's two steps."""
    import datasets
    from llamafactory.data.loader import _get_merged_dataset, _get_preprocessed_dataset
    from llamafactory.hparams import DataArguments

    datasets.disable_progress_bars()
    (folder / "dataset_info.json").write_text(json.dumps({"d": info}))
    tokenizer, real_template = _tokenizer(str(model), template)
    data = DataArguments(
        dataset="d", dataset_dir=str(folder), template=template, cutoff_len=cutoff_len, overwrite_cache=True
    )
    model_args = SimpleNamespace(cache_dir=str(folder / "cache"), hf_hub_token=None)
    training = SimpleNamespace(
        seed=42, local_process_index=0, dataloader_num_workers=0, should_log=False, predict_with_generate=False
    )
    try:
        merged = _get_merged_dataset(["d"], model_args, data, training, "rm")
        done = _get_preprocessed_dataset(merged, data, training, "rm", real_template, tokenizer)
    except Exception as error:
        cause = f" from {error.__cause__!r}" if error.__cause__ else ""
        return Outcome(f"{type(error).__name__}: {error}{cause}", [])
    return Outcome("", list(done))
