"""What config.json rules out is found; what it doesn't say is not guessed."""

from __future__ import annotations

from typing import Any

import pytest

from dpofit.models.family import FAMILIES
from dpofit.train.guard.shapes import Shapes, expected_problems

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8,
    "vocab_size": 10, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def model(layers: int = 2, dtype: str = "BF16", vocab: int = 10) -> dict[str, tuple[str, tuple[int, ...]]]:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (dtype, (vocab, 8)),
        "lm_head.weight": (dtype, (vocab, 8)),
    }
    for layer in range(layers):
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (dtype, (16, 8))
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (dtype, (8,))
    return shapes


def without(name: str) -> Shapes:
    shapes = model()
    del shapes[name]
    return shapes


def test_a_whole_model_has_no_problems() -> None:
    assert expected_problems(CONFIG, model()) == []


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        (model(layers=1), "num_hidden_layers is 2; model.layers lacks 1"),
        (model(layers=3), "num_hidden_layers is 2; model.layers also has 2"),
        (
            without("model.layers.1.mlp.up_proj.weight"),
            "model.layers.1.mlp.up_proj.weight is missing; other layers have it",
        ),
        (without("lm_head.weight"), "tie_word_embeddings is false and lm_head.weight is missing"),
        (model(dtype="F32"), "dtype is bfloat16; every matrix is F32"),
        (
            model(vocab=12) | {"lm_head.weight": ("BF16", (10, 8))},
            "model.embed_tokens.weight is [12, 8]; vocab_size and hidden_size say [10, 8]",
        ),
    ],
)
def test_each_loss_is_named(shapes: Shapes, problem: str) -> None:
    assert expected_problems(CONFIG, shapes) == [problem]


def test_a_tied_model_needs_no_head() -> None:
    assert expected_problems({**CONFIG, "tie_word_embeddings": True}, without("lm_head.weight")) == []


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tensor_missing_in_one_layer_is_found_in_every_family_that_is_planned(model_type: str) -> None:
    found = expected_problems({**CONFIG, "model_type": model_type}, without("model.layers.1.mlp.up_proj.weight"))
    assert found == ["model.layers.1.mlp.up_proj.weight is missing; other layers have it"]


def test_layers_of_a_hybrid_may_differ() -> None:
    assert expected_problems({**CONFIG, "model_type": "jamba"}, without("model.layers.1.mlp.up_proj.weight")) == []


def test_multi_token_heads_lie_in_extra_layers() -> None:
    assert expected_problems({**CONFIG, "num_nextn_predict_layers": 1}, model(layers=3)) == []


def test_a_multimodal_config_is_read_through_its_text_config() -> None:
    nested = {"architectures": CONFIG["architectures"], "text_config": CONFIG}
    assert expected_problems(nested, model(layers=1)) == ["num_hidden_layers is 2; model.layers lacks 1"]
