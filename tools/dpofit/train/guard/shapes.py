"""What config.json says about a decoder's tensors, by rules that hold for every architecture with these keys."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]

_LAYER = re.compile(r"^(.*?(?:layers|h|blocks))\.(\d{1,6})\.(.+)$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte)\.weight$")
_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
# Every layer of these has the same tensors; of others (mixtures, hybrids) that isn't assumed.
_UNIFORM = {
    "llama", "mistral", "qwen", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "phi3", "granite",
    "internlm2", "internlm3", "olmo2", "chatglm", "starcoder2", "cohere", "yi", "baichuan",
}  # fmt: skip
_MOST_LAYERS = 10_000
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def expected_problems(config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """Sentences naming tensors that are missing or have the wrong shape or dtype; empty if none is found.

    Checked: the number of layers, that every layer has the same tensors with the same shapes (for architectures
    known to be uniform), embedding and head against vocab_size and hidden_size, a missing head when
    embeddings aren't tied, and the declared dtype. Keys that a config lacks are not guessed.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) and nested else config
    return [
        *_layers(text, shapes),
        *_vocabulary(text, config, shapes),
        *_dtype(config, shapes),
    ]


def _layers(text: Mapping[str, Any], shapes: Shapes) -> list[str]:
    wanted = text.get("num_hidden_layers")
    if not isinstance(wanted, int):
        return []
    if not 0 < wanted < _MOST_LAYERS:
        return [f"num_hidden_layers is {wanted}, which no model has"]
    stacks: dict[str, dict[int, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for name, (_, shape) in shapes.items():
        if (match := _LAYER.match(name)) and "visual" not in name and "vision" not in name:
            stacks[match[1]][int(match[2])][match[3]] = shape
    if not stacks:
        return ["no tensor belongs to a layer"] if text.get("model_type") in _UNIFORM else []
    prefix, layers = max(stacks.items(), key=lambda item: len(item[1]))
    problems = []
    missing = sorted(set(range(wanted)) - set(layers))
    if missing:
        problems.append(f"num_hidden_layers is {wanted}; {prefix} lacks {', '.join(map(str, missing[:8]))}")
    extra = sorted(set(layers) - set(range(wanted)))
    if extra and not any("nextn" in key or "mtp" in key for key in text):  # multi-token heads lie in extra layers
        problems.append(f"num_hidden_layers is {wanted}; {prefix} also has {', '.join(map(str, extra[:8]))}")
    if text.get("model_type") in _UNIFORM and layers:
        usual = max(layers.values(), key=len)
        for index, tensors in sorted(layers.items()):
            for tensor, shape in usual.items():
                if tensor not in tensors:
                    problems.append(f"{prefix}.{index}.{tensor} is missing; other layers have it")
                elif tensors[tensor] != shape:
                    problems.append(f"{prefix}.{index}.{tensor} is {list(tensors[tensor])}, elsewhere {list(shape)}")
    return problems


def _vocabulary(text: Mapping[str, Any], config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    vocab, hidden = text.get("vocab_size"), text.get("hidden_size")
    problems = []
    embeddings = [name for name in shapes if _EMBEDDING.search(name)]
    heads = [name for name in shapes if _HEAD.search(name)]
    if isinstance(vocab, int) and isinstance(hidden, int):
        for name in (*embeddings, *heads):
            if shapes[name][1] != (vocab, hidden):
                problems.append(
                    f"{name} is {list(shapes[name][1])}; vocab_size and hidden_size say [{vocab}, {hidden}]"
                )
    kinds = config.get("architectures")
    generates = isinstance(kinds, list) and any(
        "CausalLM" in str(kind) or "ConditionalGeneration" in str(kind) for kind in kinds
    )
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if generates and tied is False and embeddings and not heads:
        problems.append("tie_word_embeddings is false and lm_head.weight is missing")
    return problems


def _dtype(config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    declared = _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))))
    if declared is None or "quantization_config" in config:
        return []
    matrices = {name: dtype for name, (dtype, shape) in shapes.items() if len(shape) == 2}
    odd = [name for name, dtype in matrices.items() if dtype != declared]
    if odd and len(odd) == len(matrices):
        return [f"dtype is {config.get('dtype', config.get('torch_dtype'))}; every matrix is {matrices[odd[0]]}"]
    return []
