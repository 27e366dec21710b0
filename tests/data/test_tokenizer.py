"""A tokenizer read from its folder gives the ids that transformers gives, or says that it may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpofit.data.tokenizer import Tokenizer, load_tokenizer

from .conftest import write_tokenizer

TEXTS = [
    "Hello world, the committee",
    "  two  spaces\n\n def f():\n\treturn 123456",
    "请用中文 e\u0301 é 𝔘 don't WE'LL",
    "<|im_start|>user\nx<|im_end|>\n",
    "",
]


def use_qwen_pipeline(folder: Path) -> None:
    """The normalizer and pre-tokenizer that Qwen's own tokenizer.json has."""
    from tokenizers import Regex, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    backend.save(str(folder / "tokenizer.json"))


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, Tokenizer), tokenizer
    return tokenizer


def real_ids(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.mark.stack
@pytest.mark.parametrize(
    ("tokenizer_class", "qwen_pipeline"),
    [
        ("PreTrainedTokenizerFast", False),
        ("PreTrainedTokenizerFast", True),
        ("Qwen2TokenizerFast", True),
        ("Qwen2Tokenizer", True),
        ("GPT2TokenizerFast", False),
        ("NoSuchTokenizer", False),
    ],
)
def test_ids_equal_those_of_transformers(tmp_path: Path, tokenizer_class: str, qwen_pipeline: bool):
    pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, tokenizer_class)
    if qwen_pipeline:
        use_qwen_pipeline(folder)
    assert loaded(folder).doubt == ""
    assert loaded(folder).encode_batch(TEXTS) == real_ids(folder)


@pytest.mark.stack
@pytest.mark.parametrize("tokenizer_class", ["Qwen2TokenizerFast", "LlamaTokenizerFast", "GemmaTokenizer"])
def test_a_class_that_builds_another_pipeline_is_doubted_and_really_differs(tmp_path: Path, tokenizer_class: str):
    pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, tokenizer_class)
    assert "does not use the pipeline" in loaded(folder).doubt
    assert loaded(folder).encode_batch(TEXTS) != real_ids(folder)


@pytest.mark.stack
def test_a_class_that_is_not_the_models_own_reads_tokenizer_json_as_it_is(tmp_path: Path):
    pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, "LlamaTokenizerFast")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert loaded(folder).doubt == ""
    assert loaded(folder).encode_batch(TEXTS) == real_ids(folder)


def test_a_tokenizer_of_its_own_code_is_not_run(tmp_path: Path):
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["t.T", None]}}))
    assert "its own code" in str(load_tokenizer(folder))


def test_a_broken_tokenizer_file_is_a_reason_not_a_crash(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be read" in str(load_tokenizer(tmp_path))


def test_a_head_of_a_text_has_the_tokens_asked_for(tmp_path: Path):
    tokenizer = loaded(write_tokenizer(tmp_path))
    text = "The committee met on Tuesday; 请用中文 nothing"
    for tokens in range(1, 12):
        head = tokenizer.head(text, tokens)
        assert text.startswith(head) and (head or tokens == 1)
        assert len(tokenizer.encode_batch([head])[0]) <= tokens
