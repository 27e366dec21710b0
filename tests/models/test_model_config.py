"""A dense llama-like config.json is read as transformers reads it; the rest is refused, all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.models.config import read_config
from dpofit.models.shape import ModelShape

TINY = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(folder: Path, **keys: object) -> ModelShape:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **keys}))
    return read_config(path)


def test_a_llama_config_gives_its_linears_and_parameters(tmp_path) -> None:
    shape = read(tmp_path)
    assert [(w.name, w.out_features, w.in_features, w.bias) for w in shape.linears] == [
        ("q_proj", 16, 16, False),
        ("k_proj", 8, 16, False),
        ("v_proj", 8, 16, False),
        ("o_proj", 16, 16, False),
        ("gate_proj", 24, 16, False),
        ("up_proj", 24, 16, False),
        ("down_proj", 16, 24, False),
    ]
    # layer: 256 + 128 + 128 + 256 + 3 x 384 + 2 x 16 norms = 1,952; two tables of 1,600; final norm 16
    assert shape.parameters == 2 * 1952 + 2 * 1600 + 16


def test_missing_kv_heads_mean_one_per_head_for_llama_and_eight_for_mistral(tmp_path) -> None:
    path = tmp_path / "config.json"
    config = {k: v for k, v in TINY.items() if k != "num_key_value_heads"} | {"num_attention_heads": 16}
    path.write_text(json.dumps(config))
    assert read_config(path).kv_heads == 16
    path.write_text(json.dumps(config | {"model_type": "mistral"}))
    assert read_config(path).kv_heads == 8


def test_qwen1_halves_intermediate_size_and_fuses_qkv(tmp_path) -> None:
    shape = read(tmp_path, model_type="qwen", kv_channels=4, intermediate_size=48)
    assert [(w.name, w.out_features, w.in_features, w.bias) for w in shape.linears] == [
        ("c_attn", 48, 16, True),
        ("c_proj", 16, 16, False),
        ("w1", 24, 16, False),
        ("w2", 24, 16, False),
        ("c_proj", 16, 24, False),
    ]


def test_qwen2_ignores_a_sliding_window_that_no_layer_uses(tmp_path) -> None:
    keys = {"model_type": "qwen2", "sliding_window": 4096}
    assert read(tmp_path, **keys, use_sliding_window=False, max_window_layers=0).sliding_window is None
    assert read(tmp_path, **keys, use_sliding_window=True, max_window_layers=2).sliding_window is None
    assert read(tmp_path, **keys, use_sliding_window=True, max_window_layers=1).sliding_window == 4096


@pytest.mark.parametrize(
    "model_type", ["gemma", "gemma3", "chatglm", "qwen2_moe", "mixtral", "qwen2_5_vl", "phi", None]
)
def test_another_model_type_is_refused_by_name(tmp_path, model_type: str | None) -> None:
    with pytest.raises(BadInput) as refusal:
        read(tmp_path, model_type=model_type)
    (problem,) = refusal.value.problems
    assert problem.key == "model_type"
    assert problem.wrong == (f"'{model_type}' is not modelled" if model_type else "is missing")


def test_experts_vision_and_quantised_weights_inside_a_known_type_are_refused(tmp_path) -> None:
    with pytest.raises(BadInput) as refusal:
        read(
            tmp_path,
            num_local_experts=8,
            vision_config={"depth": 1},
            quantization_config={"quant_method": "gptq"},
        )
    assert [(p.key, p.wrong) for p in refusal.value.problems] == [
        ("num_local_experts", "a mixture of experts is not modelled"),
        ("vision_config", "a vision tower is not modelled"),
        ("quantization_config", "a checkpoint quantised beforehand (gptq) is not modelled"),
    ]


def test_every_wrong_key_is_named_at_once(tmp_path) -> None:
    with pytest.raises(BadInput) as refusal:
        read(tmp_path, vocab_size=None, hidden_size="wide", num_hidden_layers=0, num_attention_heads=True)
    assert [(p.key, p.wrong) for p in refusal.value.problems] == [
        ("vocab_size", "is missing"),
        ("hidden_size", "'wide' is not a positive whole number"),
        ("num_hidden_layers", "0 is not a positive whole number"),
        ("num_attention_heads", "True is not a positive whole number"),
    ]


def test_numbers_no_model_has_are_refused(tmp_path) -> None:
    with pytest.raises(BadInput) as refusal:
        read(tmp_path, intermediate_size=10**30, num_hidden_layers=10**6)
    assert [(p.key, p.wrong) for p in refusal.value.problems] == [
        ("intermediate_size", "is more than 1,000,000,000"),
        ("num_hidden_layers", "is more than 1,000"),
    ]


def test_kv_heads_must_divide_the_heads(tmp_path) -> None:
    with pytest.raises(BadInput, match="3 does not divide 4 attention heads"):
        read(tmp_path, num_key_value_heads=3)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("{", "is not JSON"),
        pytest.param("[" * 100_000, "is not JSON", id="deep"),
        ("[1]", "is not a JSON object"),
        ("\udcff", "is not JSON"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content: str, wrong: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match=wrong):
        read_config(path)
