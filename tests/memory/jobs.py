"""Jobs for the tests of this room, built from plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpofit.hardware.cluster import Cluster, Gpu
from dpofit.hardware.gpus import find_gpu
from dpofit.memory.job import PINNED, Job, Lengths, Stack
from dpofit.memory.meter import Peak, phase_peaks
from dpofit.memory.step import build_program, plan_steps
from dpofit.models.config import shape_from_config
from dpofit.models.known import find_model
from dpofit.models.shape import ModelShape
from dpofit.recipe.recipe import Recipe, ZeroConfig

GPU = frozenset({"gpu"})
AUTO: dict[str, Any] = {
    "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto",
    "gather_16bit_weights_on_save": True,
}  # fmt: skip


def zero(stage: int, **fields: Any) -> ZeroConfig:
    return ZeroConfig("test", stage, **{"overlap_comm": stage == 3, **AUTO, **fields})


def tiny(layers: int = 4, vocab: int = 1000, hidden: int = 64, **fields: Any) -> ModelShape:
    config = {
        "model_type": "qwen2", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 65536, "tie_word_embeddings": False, **fields,
    }  # fmt: skip
    return shape_from_config(config, name="tiny", source="test", where="test")


def job(
    model: str | ModelShape = "Qwen/Qwen2.5-72B", *, prompt: int = 8192, response: int = 1024, padded: bool = False,
    nodes: int = 4, gpus: int = 8, gpu: str | int = "a100-80g", host_gib: int | None = None, stack: Stack = PINNED,
    zero: ZeroConfig | None = None, **recipe: Any,
) -> Job:  # fmt: skip
    shape = find_model(model, None) if isinstance(model, str) else model
    fields: dict[str, Any] = {
        "stage": "dpo", "finetuning": "full", "micro_batch": 1, "gradient_accumulation": 1, "bf16": True,
        "optim": "adamw_torch_fused", "flash_attn": "fa2", "expandable_segments": True, "saves": True, **recipe,
    }  # fmt: skip
    card = find_gpu(gpu) if isinstance(gpu, str) else Gpu("exact", gpu, "test", 0)
    cluster = Cluster(card, nodes, gpus, None if host_gib is None else host_gib * 2**30)
    built = Recipe(name="test", source=Path("test.yaml"), settings={}, model=shape.name, zero=zero, **fields)
    return Job(built, shape, cluster, Lengths(prompt, response, response, padded), stack)


def peaks(planned: Job, spaces: frozenset[str] = GPU) -> dict[str, Peak]:
    """Peaks of the steady step's phases, and of load and init."""
    program = build_program(planned, plan_steps(planned))
    return {peak.phase: peak for peak in phase_peaks(program, spaces) if peak.step != 1}
