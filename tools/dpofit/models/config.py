"""Reads a transformers config of a dense decoder into a ModelShape; refuses everything else by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.models.family import FAMILIES
from dpofit.models.shape import Linear, ModelShape

SUPPORTED = (
    "dense decoders of model_type llama, mistral, phi3, qwen (1), qwen2 (also Qwen1.5 and Qwen2.5), qwen3, gemma2, "
    "gemma3_text, glm or glm4"
)
# Above these a number is a slip of the keyboard, or not a config of a model at all.
_LARGEST, _MOST_LAYERS = 1_000_000_000, 1_000
_REMEDY = "Give the config.json the model was published with"

# What a config leaves out takes the default of its class: transformers 5.5.4
# models/<type>/configuration_<type>.py. None for KV heads means one per query head.
_KV_HEADS_DEFAULT: dict[str, int | None] = {
    "llama": None,
    "mistral": 8,
    "phi3": None,
    "qwen": None,
    "qwen2": 32,
    "qwen3": 32,
    "gemma2": 4,
    "gemma3_text": 4,
    "glm": 2,
    "glm4": 2,
}
_POSITIONS_DEFAULT = {
    "llama": 2048, "mistral": 131072, "phi3": 4096, "qwen": 8192, "qwen2": 32768, "qwen3": 32768, "gemma2": 8192,
    "gemma3_text": 131072, "glm": 131072, "glm4": 131072,
}  # fmt: skip
_HEAD_DIM_DEFAULT = {"qwen": 128, "qwen3": 128, "gemma2": 256, "gemma3_text": 256, "glm": 128, "glm4": 128}
_TIED_BY_DEFAULT = ("gemma2", "gemma3_text")
_WINDOW_DEFAULT = {"mistral": 4096, "phi3": None, "gemma2": 4096, "gemma3_text": 4096}
_ATTENTION_SOFTCAP_DEFAULT = {"gemma2": 50.0}  # Gemma 3's attention never gets its own (modeling_gemma3.py:361-371)
_LOGIT_SOFTCAP_DEFAULT = {"gemma2": 30.0, "gemma3_text": None}
_ROTARY_SHARE_DEFAULT = {"phi3": 1.0, "glm": 0.5, "glm4": 0.5}

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
    if model_type not in FAMILIES:
        wrong = f"{model_type!r} is not modelled" if model_type else "is missing"
        raise BadInput(Problem(where, "model_type", wrong, f"Supported: {SUPPORTED}"))

    problems = _refusals(config, where)
    reader = _Reader(config, where, problems)
    vocab = reader.positive("vocab_size")
    hidden = reader.positive("hidden_size")
    intermediate = reader.positive("intermediate_size")
    layers = reader.positive("num_hidden_layers")
    heads = reader.positive("num_attention_heads")
    head_dim_default = _HEAD_DIM_DEFAULT.get(model_type, hidden // heads)
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
    rotary_dim = reader.rotary_dim(head_dim, _ROTARY_SHARE_DEFAULT.get(model_type))
    if problems:
        raise BadInput(problems)

    if model_type == "qwen":
        intermediate //= 2  # Qwen 1 modeling_qwen.py, class MLP: ff_dim_in = config.intermediate_size // 2
        linears = _qwen1_linears(config, hidden, heads * head_dim, intermediate)
    elif model_type == "phi3":
        linears = _phi3_linears(hidden, heads * head_dim, kv_heads * head_dim, intermediate)
    elif FAMILIES[model_type].fused_gate_up:
        linears = _glm_linears(config, hidden, heads * head_dim, kv_heads * head_dim, intermediate)
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
        tied_embeddings=bool(config.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)),
        linears=linears,
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        rotary_dim=rotary_dim,
        attention_softcap=_softcap(config, "attn_logit_softcapping", _ATTENTION_SOFTCAP_DEFAULT),
        logit_softcap=_softcap(config, "final_logit_softcapping", _LOGIT_SOFTCAP_DEFAULT),
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

    def rotary_dim(self, head_dim: int, default: float | None) -> int:
        """Elements of each head that get rotary positions, 0 for all; `default` None where the family rotates all."""
        if default is None:
            return 0
        rope = self._config.get("rope_parameters") or {}
        share = self._config.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
        if share is None:
            share = default
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            wrong = f"{share!r} is not a share of each head"
            self._problems.append(Problem(self._where, "partial_rotary_factor", wrong, _REMEDY))
            return 0
        return int(head_dim * share) if share < 1 else 0

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
    # transformers 5.5.4: modeling_qwen2.py has bias=True on q, k, v and False on o; llama, qwen3 and gemma put
    # attention_bias on all four; mistral has none; only llama reads mlp_bias.
    model_type = config["model_type"]
    attention_bias = model_type in ("llama", "qwen3", "gemma2", "gemma3_text") and bool(
        config.get("attention_bias", False)
    )
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


def _glm_linears(
    config: Mapping[str, Any], hidden: int, q_width: int, kv_width: int, intermediate: int
) -> tuple[Linear, ...]:
    # transformers 5.5.4 modeling_glm.py, modeling_glm4.py: attention_bias, true by default, on q, k, v and not on o
    bias = bool(config.get("attention_bias", True))
    return (
        Linear("q_proj", hidden, q_width, bias),
        Linear("k_proj", hidden, kv_width, bias),
        Linear("v_proj", hidden, kv_width, bias),
        Linear("o_proj", q_width, hidden, False),
        Linear("gate_up_proj", hidden, 2 * intermediate, False),
        Linear("down_proj", intermediate, hidden, False),
    )


def _softcap(config: Mapping[str, Any], key: str, defaults: Mapping[str, float | None]) -> float | None:
    """Families without a default ignore the key."""
    model_type = config["model_type"]
    value = config.get(key, defaults[model_type]) if model_type in defaults else None
    return float(value) if isinstance(value, int | float) and value else None


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
    """The window if any layer uses it: mistral, phi3, gemma always, qwen2 and qwen3 from layer max_window_layers on."""
    model_type = config["model_type"]
    window = config.get("sliding_window", _WINDOW_DEFAULT.get(model_type))
    used = model_type in _WINDOW_DEFAULT or (
        config.get("use_sliding_window", False) and config.get("max_window_layers", 28) < layers
    )
    return window if used and isinstance(window, int) else None
