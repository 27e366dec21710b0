"""Reads a transformers config of a dense decoder into a ModelShape; refuses everything else by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.models.shape import Linear, ModelShape

SUPPORTED = "dense decoders of model_type llama, mistral, phi3, qwen (1), qwen2 (also Qwen1.5 and Qwen2.5) or qwen3"
# Above these a number is a slip of the keyboard, or not a config of a model at all.
_LARGEST, _MOST_LAYERS = 1_000_000_000, 1_000
_REMEDY = "Give the config.json the model was published with"
_TYPES = ("llama", "mistral", "phi3", "qwen", "qwen2", "qwen3")

# What a config leaves out takes the default of its class: transformers 5.5.4
# models/<type>/configuration_<type>.py. None for KV heads means one per query head.
_KV_HEADS_DEFAULT: dict[str, int | None] = {
    "llama": None,
    "mistral": 8,
    "phi3": None,
    "qwen": None,
    "qwen2": 32,
    "qwen3": 32,
}
_POSITIONS_DEFAULT = {"llama": 2048, "mistral": 131072, "phi3": 4096, "qwen": 8192, "qwen2": 32768, "qwen3": 32768}

# Keys that turn one of the types above into something this model of memory does not describe.
_REFUSED_KEYS = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "num_nextn_predict_layers": "multi-token heads",
}


def read_config(path: Path) -> ModelShape:
    """The shape described by the `config.json` at `path`; BadInput names all its problems at once."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(Problem(str(path), None, f"cannot be read ({error.strerror})", "")) from None
    except (ValueError, RecursionError) as error:
        raise BadInput(Problem(str(path), None, f"is not JSON ({error})", _REMEDY)) from None
    if not isinstance(config, dict):
        raise BadInput(Problem(str(path), None, "is not a JSON object", _REMEDY))
    name = path.parent.name if path.name == "config.json" else path.stem
    return shape_from_config(config, name=name or str(path), source=f"read from {path}", where=str(path))


def shape_from_config(config: Mapping[str, Any], *, name: str, source: str, where: str) -> ModelShape:
    """A ModelShape from the keys of a transformers config; BadInput lists every wrong or missing key."""
    model_type = config.get("model_type")
    if model_type not in _TYPES:
        wrong = f"{model_type!r} is not modelled" if model_type else "is missing"
        raise BadInput(Problem(where, "model_type", wrong, f"Supported: {SUPPORTED}"))

    problems = _refusals(config, where)
    reader = _Reader(config, where, problems)
    vocab = reader.positive("vocab_size")
    hidden = reader.positive("hidden_size")
    intermediate = reader.positive("intermediate_size")
    layers = reader.positive("num_hidden_layers")
    heads = reader.positive("num_attention_heads")
    head_dim_default = 128 if model_type in ("qwen", "qwen3") else hidden // heads
    head_dim = reader.positive("kv_channels" if model_type == "qwen" else "head_dim", head_dim_default)
    kv_heads = heads
    if model_type != "qwen" and config.get("num_key_value_heads", "absent") is not None:
        kv_heads = reader.positive("num_key_value_heads", _KV_HEADS_DEFAULT[model_type] or heads)
    positions_default = config.get("seq_length") or _POSITIONS_DEFAULT[model_type]
    positions = reader.positive("max_position_embeddings", positions_default)
    if not problems and heads % kv_heads:
        problems.append(
            Problem(where, "num_key_value_heads", f"{kv_heads} does not divide {heads} attention heads", "")
        )
    if model_type == "phi3" and reader.partial_rotary():
        problems.append(
            Problem(where, "partial_rotary_factor", "rotary positions on a part of each head are not modelled", "")
        )
    if problems:
        raise BadInput(problems)

    if model_type == "qwen":
        intermediate //= 2  # Qwen 1 modeling_qwen.py, class MLP: ff_dim_in = config.intermediate_size // 2
        linears = _qwen1_linears(config, hidden, heads * head_dim, intermediate)
    elif model_type == "phi3":
        linears = _phi3_linears(hidden, heads * head_dim, kv_heads * head_dim, intermediate)
    else:
        linears = _llama_linears(config, hidden, heads * head_dim, kv_heads * head_dim, intermediate)
    return ModelShape(
        name=name,
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        linears=linears,
        qk_norm=model_type == "qwen3",
        sliding_window=_sliding_window(config, layers),
        max_positions=positions,
        source=source,
    )


def _refusals(config: Mapping[str, Any], where: str) -> list[Problem]:
    problems = [
        Problem(where, key, f"{meaning} is not modelled", f"Supported: {SUPPORTED}")
        for key, meaning in _REFUSED_KEYS.items()
        if config.get(key)
    ]
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else "?"
        problems.append(
            Problem(
                where,
                "quantization_config",
                f"a checkpoint quantised beforehand ({method}) is not modelled",
                "Give the 16-bit model, with quantization_bit: 4 in the recipe for QLoRA",
            )
        )
    return problems


class _Reader:
    """Positive integers out of a config; what is wrong is appended to `problems`, and 1 stands in for it."""

    def __init__(self, config: Mapping[str, Any], where: str, problems: list[Problem]) -> None:
        self._config, self._where, self._problems = config, where, problems

    def partial_rotary(self) -> bool:
        """Does only a part of each head get rotary positions (Phi-4-mini)?"""
        rope = self._config.get("rope_parameters") or {}
        factor = self._config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
        return factor not in (None, 1.0)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        most = _MOST_LAYERS if key == "num_hidden_layers" else _LARGEST
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
        wrong = "is missing" if value is None else f"{value!r} is not a positive whole number"
        if isinstance(value, int) and value > most:
            wrong = f"is more than {most:,}"
        self._problems.append(Problem(self._where, key, wrong, _REMEDY))
        return 1


def _llama_linears(
    config: Mapping[str, Any], hidden: int, q_width: int, kv_width: int, intermediate: int
) -> tuple[Linear, ...]:
    # transformers 5.5.4: modeling_qwen2.py has bias=True on q, k, v and False on o; llama and qwen3 put
    # attention_bias on all four; mistral has none; only llama reads mlp_bias.
    model_type = config["model_type"]
    attention_bias = model_type in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    qkv_bias = attention_bias or model_type == "qwen2"
    mlp_bias = model_type == "llama" and bool(config.get("mlp_bias", False))
    return (
        Linear("q_proj", hidden, q_width, qkv_bias),
        Linear("k_proj", hidden, kv_width, qkv_bias),
        Linear("v_proj", hidden, kv_width, qkv_bias),
        Linear("o_proj", q_width, hidden, attention_bias),
        Linear("gate_proj", hidden, intermediate, mlp_bias),
        Linear("up_proj", hidden, intermediate, mlp_bias),
        Linear("down_proj", intermediate, hidden, mlp_bias),
    )


def _phi3_linears(hidden: int, q_width: int, kv_width: int, intermediate: int) -> tuple[Linear, ...]:
    # transformers 5.5.4 modeling_phi3.py: one projection for q, k, v, one for gate and up; no biases
    return (
        Linear("qkv_proj", hidden, q_width + 2 * kv_width, False),
        Linear("o_proj", q_width, hidden, False),
        Linear("gate_up_proj", hidden, 2 * intermediate, False),
        Linear("down_proj", intermediate, hidden, False),
    )


def _qwen1_linears(config: Mapping[str, Any], hidden: int, width: int, intermediate: int) -> tuple[Linear, ...]:
    # Qwen 1 modeling_qwen.py: c_attn fuses q, k and v and always has a bias; attention and MLP both
    # call their output c_proj, so a LoRA target c_proj means both.
    bias = not config.get("no_bias", True)
    return (
        Linear("c_attn", hidden, 3 * width, True),
        Linear("c_proj", width, hidden, bias),
        Linear("w1", hidden, intermediate, bias),
        Linear("w2", hidden, intermediate, bias),
        Linear("c_proj", intermediate, hidden, bias),
    )


def _sliding_window(config: Mapping[str, Any], layers: int) -> int | None:
    """The window if any layer uses it: mistral always, qwen2 and qwen3 from layer max_window_layers on."""
    window = config.get("sliding_window")
    if config["model_type"] == "mistral":
        window = config.get("sliding_window", 4096)
        return window if isinstance(window, int) else None
    used = config.get("use_sliding_window", False) and config.get("max_window_layers", 28) < layers
    return window if used and isinstance(window, int) else None
