"""Bytes that real optimizers keep for a weight, counted after a step: `python benchmarks/optimizer_states.py`.

Muon is LLaMA-Factory's own; the others are packages beside the training stack:
`pip install --no-deps galore-torch==1.0 apollo-torch==1.0.3 adam-mini==1.1.1`. Writes
benchmarks/results/optimizer_states.json, which tests/memory/test_own_optimizers.py holds the memory model to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESULTS = Path(__file__).parent / "results" / "optimizer_states.json"
HIDDEN, HEADS = 64, 4
SHAPES = {"q_proj": (64, 64), "k_proj": (32, 64), "o_proj": (64, 64), "up_proj": (160, 64), "down_proj": (64, 160)}
PACKAGES = {"use_galore": "galore-torch", "use_apollo": "apollo-torch", "use_adam_mini": "adam-mini"}


def cases() -> Iterator[dict[str, Any]]:
    """LLaMA-Factory's keys."""
    yield {"use_muon": True}
    yield {"use_adam_mini": True}
    for projection in ("std", "reverse_std", "left", "right", "full"):
        yield {"use_galore": True, "galore_rank": 8, "galore_proj_type": projection}
    for kind in ("random", "svd"):  # with apollo_proj_type left or right the first step fails on shapes
        yield {"use_apollo": True, "apollo_rank": 8, "apollo_proj": kind}


def kept(keys: Mapping[str, Any], dtype: str) -> dict[str, int]:
    """Bytes of the states of each weight of a small model, whole storages, after one step."""
    import torch
    from llamafactory.hparams import FinetuningArguments
    from llamafactory.train.trainer_utils import create_custom_optimizer
    from transformers.training_args import OptimizerNames

    torch.manual_seed(0)
    model = torch.nn.Module()
    model.config = SimpleNamespace(  # type: ignore[assignment]
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=2, model_type="llama"
    )
    layer = torch.nn.Module()
    for name, (rows, columns) in SHAPES.items():
        layer.add_module(name, torch.nn.Linear(columns, rows, bias=name == "k_proj"))
    model.add_module("mlp", layer)
    model.add_module("embed_tokens", torch.nn.Embedding(96, HIDDEN))
    model.add_module("lm_head", torch.nn.Linear(HIDDEN, 96, bias=False))
    model.to(getattr(torch, dtype))
    arguments = SimpleNamespace(
        optim=OptimizerNames("adamw_torch"), optim_args=None, learning_rate=1e-6, adam_beta1=0.9, adam_beta2=0.999,
        adam_epsilon=1e-8, weight_decay=0.0, gradient_accumulation_steps=1,
    )  # fmt: skip
    with redirect_stdout(StringIO()):
        finetuning = FinetuningArguments(stage="sft", finetuning_type="full", **keys)
        made = create_custom_optimizer(model, arguments, finetuning)  # type: ignore[arg-type]
        assert made is not None
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        made.step()
    return {
        name.removeprefix("mlp.").removesuffix(".weight"): _bytes(made.state[parameter])
        for name, parameter in model.named_parameters()
    }


def _bytes(state: Mapping[str, Any]) -> int:
    """Of matrices and vectors; numbers don't count. A projector keeps what it projects by."""
    import torch

    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    projection = getattr(state.get("projector"), "ortho_matrix", None)
    tensors += projection if isinstance(projection, list) else [] if projection is None else [projection]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dim()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main() -> None:
    rows = [
        {"keys": keys, "dtype": dtype, "kept_bytes": kept(keys, dtype)}
        for keys, dtype in product(cases(), ("bfloat16", "float32"))
    ]
    names = ["torch", "llamafactory", *PACKAGES.values()]
    versions = {name: version(name).partition("+")[0] for name in names}
    lines = ",\n".join(json.dumps(row) for row in rows)
    RESULTS.write_text(
        f'{{"versions": {json.dumps(versions)}, "shapes": {json.dumps(SHAPES)}, "rows": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
