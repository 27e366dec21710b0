"""A tokenizer made on the spot, in a folder as a model has it: no network, no download."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

# Without the `data` extra there is nothing here to test but its error, which needs no file.
collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("datasketch") is None else []

TEXTS = [
    "Summarise the report in two sentences, then list the open questions.",
    "The committee met on Tuesday; nothing was decided, and everybody was content.",
    "请用中文简要说明这个问题的原因，并给出三个解决办法。",
    "def add(a, b):\n    return a + b\n",
]
SPECIALS = ["<|endoftext|>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


def write_tokenizer(folder: Path, tokenizer_class: str = "PreTrainedTokenizerFast", eos: str = "<|endoftext|>") -> Path:
    """Train a small byte-level BPE and write tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))
