"""The shapes agree with what transformers really builds, weight by weight."""

from __future__ import annotations

import pytest

from dpofit.models.config import read_config
from dpofit.models.known import find_model, known_models
from dpofit.models.shape import ModelShape

pytestmark = pytest.mark.stack

_SIZES = {
    find_model(name).parameters: name for name in known_models() if find_model(name).model_type != "qwen"
}  # one name per distinct size; Qwen 1 is remote code that transformers does not hold


def build(shape: ModelShape, layers: int):
    """transformers' own model of `shape` on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied_embeddings,
        **dict(shape.architecture_keys),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", _SIZES.values())
def test_one_layer_has_the_weights_transformers_builds(name: str) -> None:
    shape = find_model(name)
    layer = build(shape, 1).model.layers[0]
    built = {
        path.rsplit(".", 1)[-1]: (module.out_features, module.in_features, module.bias is not None)
        for path, module in layer.named_modules()
        if hasattr(module, "in_features")
    }
    assert built == {w.name: (w.out_features, w.in_features, w.bias) for w in shape.linears}
    assert sum(p.numel() for p in layer.parameters()) == shape.layer_parameters


@pytest.mark.parametrize("name", _SIZES.values())
def test_the_whole_model_has_as_many_parameters(name: str) -> None:
    shape = find_model(name)
    assert sum(p.numel() for p in build(shape, shape.layers).parameters()) == shape.parameters


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 24, "num_key_value_heads": None}),
        ("mistral", {"num_attention_heads": 16, "hidden_size": 64}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
        ("phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma3_text", {"attention_bias": True}),
        ("glm", {"pad_token_id": 0}),
        ("glm4", {"attention_bias": False, "pad_token_id": 0}),
    ],
)
def test_a_config_that_transformers_saved_is_read_back_as_it_was_built(tmp_path, model_type: str, keys: dict) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**tiny, **keys})
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    shape = read_config(tmp_path / "config.json")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.max_positions == config.max_position_embeddings
