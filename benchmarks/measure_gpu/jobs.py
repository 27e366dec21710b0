"""The jobs to measure, the most telling first, and each one's Job as dpofit plans it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpofit.hardware.cluster import Cluster, Gpu
from dpofit.memory.job import PINNED, Job, Lengths, Stack
from dpofit.models.config import shape_from_config
from dpofit.models.known import find_model
from dpofit.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SHARE = 8  # an eighth of a row is the answer
LARGE, WHOLE_7B, WHOLE_3B, WHOLE_1B, WHOLE_HALF_B = (
    "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuJob:
    """One run of one process on one card. `rows`: tokens of the longest row of each step, in order."""

    name: str
    model: str  # a known model; its first `layers` layers, None for all
    layers: int | None
    rows: tuple[int, ...]
    settings: Mapping[str, Any]  # LLaMA-Factory keys beside those that every job has
    deepspeed: str | None = None  # a file of deepspeed/
    expandable: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # importable modules
    snapshot: bool = False  # also keep the allocator's own record of every request
    timeout_s: int = 180

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        shape = find_model(self.model)
        return {
            "architectures": ["Qwen2ForCausalLM"], "model_type": shape.model_type, "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": self.layers or shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "max_position_embeddings": shape.max_positions,
            "tie_word_embeddings": shape.tied_embeddings, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 3,
        }  # fmt: skip

    @property
    def model_folder(self) -> str:
        """The name of the folder that its weights are written to, shared by jobs of one model."""
        return f"{self.model.rpartition('/')[2]}-{self.layers or 'all'}"

    def recipe(self, folder: Path) -> dict[str, Any]:
        """The whole LLaMA-Factory recipe of a run in `folder`, whose parent holds the models."""
        common: dict[str, Any] = {
            "model_name_or_path": str(folder.parent / self.model_folder), "stage": "dpo", "do_train": True,
            "template": "default", "dataset": "rows", "dataset_dir": str(folder), "cutoff_len": max(self.rows),
            "disable_shuffling": True, "bf16": True, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1, "max_steps": len(self.rows), "learning_rate": 1e-6,
            "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "output_dir": str(folder / "output"),
        }  # fmt: skip
        if self.deepspeed is not None:
            common["deepspeed"] = str(ROOT / "deepspeed" / self.deepspeed)
        return {**common, **self.settings}


def planned(
    job: GpuJob, gpu: Gpu, stack: Stack = PINNED, rows: Sequence[int] | None = None
) -> tuple[Job, tuple[Lengths, ...]]:
    """The Job dpofit plans for one card of kind `gpu`, and its shorter batches; `rows`: what the batches really were.

    BadInput for what is not modelled.
    """
    rows = rows or job.rows
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "recipe.json"
        path.write_text(json.dumps(job.recipe(Path(name))), encoding="utf-8")
        recipe = load_recipe(str(path), environment=job.environment).recipe
    model = shape_from_config(job.config, name=job.model_folder, source="benchmarks/measure_gpu", where=job.name)
    padded = recipe.stage == "dpo"  # rejected answers are shorter; SFT rows of one batch are alike
    longest = _lengths(max(rows), padded)
    shorter = tuple(_lengths(row, padded) for row in dict.fromkeys(rows) if row != max(rows))
    recipe = replace(recipe, expandable_segments=job.expandable)
    return Job(recipe, model, Cluster(gpu, 1, 1), longest, stack), shorter


def _lengths(row: int, padded: bool) -> Lengths:
    answer = row // ANSWER_SHARE
    return Lengths(row - answer, answer, answer // 2, padded)


def _lora(**settings: Any) -> dict[str, Any]:
    return {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", **settings}


def _full(**settings: Any) -> dict[str, Any]:
    return {"finetuning_type": "full", **settings}


def _same(row: int, steps: int = 3) -> tuple[int, ...]:
    return (row,) * steps


_LIGER, _UNSLOTH = {"enable_liger_kernel": True}, {"use_unsloth_gc": True}
_LONG, _ANSWERS = {"DPOFIT_LONG_CONTEXT": "all"}, {"DPOFIT_LONG_CONTEXT": "answer_logps"}
_MIXED = (4608, 6912, 3072, 9216, 2048, 8192, 9216)
Z3, Z3_OFFLOAD, Z2 = "z3.json", "z3_offload.json", "z2.json"

# Two layers of the 72B are 4.2e9 parameters, nearly all in embedding and head. LoRA leaves room on one card for the
# field notes' 8k prompts with 1k answers, whose peak is the logits; full fine-tuning takes half that row.
JOBS: tuple[GpuJob, ...] = (
    GpuJob("72b2-lora-z3-t9216", LARGE, 2, _same(9216), _lora(), Z3),
    GpuJob("72b2-lora-z3-liger-t9216", LARGE, 2, _same(9216), _lora(**_LIGER), Z3, needs=("liger_kernel",)),
    GpuJob("72b2-lora-z3-unsloth-gc-t9216", LARGE, 2, _same(9216), _lora(**_UNSLOTH), Z3),
    GpuJob("72b2-lora-z3-mixed", LARGE, 2, _MIXED, _lora(), Z3),
    GpuJob("72b2-lora-z3-mixed-no-expandable", LARGE, 2, _MIXED, _lora(), Z3, expandable=False),
    GpuJob("72b2-full-z3-t4096", LARGE, 2, _same(4096), _full(), Z3),
    GpuJob("72b2-full-z3-orpo-t4096", LARGE, 2, _same(4096), _full(pref_loss="orpo"), Z3),
    GpuJob("72b2-full-z3-offload-t9216", LARGE, 2, _same(9216), _full(), Z3_OFFLOAD, timeout_s=240),
    GpuJob("72b2-lora-z3-liger-unsloth-gc-t16384", LARGE, 2, _same(16384), _lora(**_LIGER, **_UNSLOTH), Z3,
           needs=("liger_kernel",)),
    GpuJob("72b2-lora-z3-long-t9216", LARGE, 2, _same(9216), _lora(), Z3, environment=_LONG),
    GpuJob("72b2-lora-z3-answer-logps-t9216", LARGE, 2, _same(9216), _lora(), Z3, environment=_ANSWERS),
    GpuJob("0.5b-full-t2048", WHOLE_HALF_B, None, _same(2048), _full()),
    GpuJob("0.5b2-lora-mixed-snapshot", WHOLE_HALF_B, 2, (512, 768, 384, 1024), _lora(), snapshot=True),
    GpuJob("0.5b2-lora-mixed-no-expandable-snapshot", WHOLE_HALF_B, 2, (512, 768, 384, 1024), _lora(),
           expandable=False, snapshot=True),
    GpuJob("7b-sft-lora-b4-t4096-no-expandable", WHOLE_7B, None, _same(4096),
           _lora(stage="sft", per_device_train_batch_size=4), expandable=False),
    GpuJob("7b-lora-t4096", WHOLE_7B, None, _same(4096), _lora()),
    GpuJob("7b-full-orpo-pure-bf16-t2048", WHOLE_7B, None, _same(2048),
           {"finetuning_type": "full", "pref_loss": "orpo", "pure_bf16": True, "bf16": False}),
    GpuJob("3b-full-z3-t4096", WHOLE_3B, None, _same(4096), _full(), Z3),
    GpuJob("1.5b-full-z2-t4096", WHOLE_1B, None, _same(4096), _full(), Z2),
    GpuJob("7b-lora-fa2-t4096", WHOLE_7B, None, _same(4096), _lora(flash_attn="fa2"), needs=("flash_attn",)),
    GpuJob("7b-qlora-t4096", WHOLE_7B, None, _same(4096), _lora(quantization_bit=4), needs=("bitsandbytes",)),
    GpuJob("72b2-lora-z3-t2048", LARGE, 2, _same(2048), _lora(), Z3),
)  # fmt: skip
