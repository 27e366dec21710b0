"""Writes a model folder with random weights: config.json, the smoke run's tokenizer, bf16 safetensors.

A process of its own (`python -m benchmarks.measure_gpu.weights FOLDER CONFIG.json`), so that what is measured starts
on an untouched card.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from dpofit.launch.smoke import ASSETS

SHARD_BYTES = 4 * 2**30
TILE = 2**24  # values that are drawn; larger tensors repeat them


def write_model(folder: Path, config: dict) -> None:
    """Write `folder` whole, then move it into place: a folder that exists is complete."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    tied = set(model._tied_weights_keys or ()) if config["tie_word_embeddings"] else set()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    staging = folder.with_name(folder.name + ".part")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(ASSETS / "tokenizer", staging)
    (staging / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tile = torch.randn(TILE, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(shard, staging / name, {"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        norm = len(shape) == 1 and not name.endswith("bias")
        shard[name] = torch.ones(shape, dtype=torch.bfloat16) if norm else _filled(tile, shape)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    document = {"metadata": {}, "weight_map": index}
    (staging / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")
    staging.rename(folder)


def _filled(tile, shape):
    count = shape.numel()
    return tile.repeat(-(-count // TILE))[:count].reshape(shape)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
