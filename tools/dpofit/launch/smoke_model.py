"""Shrinks a model's config.json: the same architecture and options, two layers 64 wide, our 260-token tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.models.known import find_model
from dpofit.models.shape import ModelShape

VOCABULARY = 320  # 260 tokens of the shipped tokenizer, room for the special tokens that templates add
_HIDDEN, _LAYERS, _HEADS, _HEAD_DIM = 64, 2, 4, 16
# Token ids of the shipped tokenizer (smoke_assets/tokenizer/tokenizer.json).
_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
_REMOTE_CODE = ("qwen",)  # Qwen 1: transformers has no class for it


def tiny_config(model: str, recipe_folder: Path) -> dict[str, Any]:
    """The shrunk config of a recipe's model: a folder with config.json keeps every key that is not a size, a known
    name is built from its shape. BadInput for what find_model refuses."""
    shape = find_model(model, base=recipe_folder)
    if shape.model_type in _REMOTE_CODE:
        right = "Smoke-launch a recipe of Qwen1.5 or newer."
        wrong = "needs code from the model's own repository, which a smoke run never executes"
        raise BadInput(Problem(str(recipe_folder), "model_name_or_path", wrong, right))
    for candidate in (Path(model).expanduser(), recipe_folder / model):
        path = candidate / "config.json" if candidate.is_dir() else candidate
        if path.is_file():
            return shrunk(json.loads(path.read_text(encoding="utf-8")), shape)
    return shrunk({"model_type": shape.model_type}, shape)


def shrunk(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """`config` with every size replaced; heads keep the ratio of query to key heads, so that groups stay groups."""
    small = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config", "dtype")}
    small |= {
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": max(1, _HEADS * shape.kv_heads // shape.heads),
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
        **_SPECIAL_TOKENS,
    }
    if shape.model_type == "llama":
        small.setdefault("attention_bias", any(linear.bias for linear in shape.linears))
    if isinstance(small.get("layer_types"), list):
        small["layer_types"] = small["layer_types"][:_LAYERS]
    if "max_window_layers" in small:
        small["max_window_layers"] = min(_LAYERS, int(small["max_window_layers"]))
    return small
