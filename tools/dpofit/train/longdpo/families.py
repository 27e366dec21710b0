"""The model families whose forward the pieces know, by what transformers calls them."""

from __future__ import annotations

from typing import Any

from dpofit.errors import Problem

# Their CausalLM is `lm_head(model(...).last_hidden_state)` and nothing more (transformers 5.5.4 modeling_*.py); others
# scale or cap the logits, which a head that gives log-probs would skip.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LOADER = "llamafactory.model.loader"


def forward_target(family: str, suffix: str) -> str:
    """Hook target of a family's `forward`; suffix `ForCausalLM` or `Model`."""
    return f"transformers.models.{family}.modeling_{family}:{FAMILIES[family]}{suffix}.forward"


def family_problems(config: Any, piece: str) -> list[Problem]:
    """None for a model (its transformers config) of a known family."""
    if config.model_type in FAMILIES:
        return []
    known = ", ".join(FAMILIES)
    return [
        Problem("model", "model_type", f"{piece} does not know {config.model_type}", f"Turn it off; known: {known}.")
    ]
