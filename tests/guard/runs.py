"""Real Trainer runs on real ranks, small: what the guard's tests save, resume and break."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One training run; every field has the value that most tests want."""

    output_dir: str
    zero: int | None = 3
    offload: bool = False
    tied: bool = False
    vocab: int = 259  # odd on purpose: partitions need padding
    hidden: int = 32
    layers: int = 2
    kv_heads: int = 1
    lora: bool = False
    dora: bool = False
    steps: int = 2
    save_steps: int = 1
    save_only_model: bool = False
    save_total_limit: int | None = None
    guarded: bool = True
    resume: str | bool | None = None
    max_shard_bytes: int | None = None
    final_save: bool = True
    bf16: bool = True
    buffer: bool = False
    freeze: bool = False  # embeddings and the first layer don't train, as in finetuning_type freeze
    vision: bool = False  # a Qwen2-VL with its tower
    fp16: bool = False
    quantization_bit: int | None = None  # the base, by bitsandbytes; needs lora or dora
    optim: str = "adamw_torch"
    extra: dict[str, Any] = field(default_factory=dict)
    zero_extra: dict[str, Any] = field(default_factory=dict)  # more keys of zero_optimization
    deepspeed_extra: dict[str, Any] = field(default_factory=dict)  # and of the whole DeepSpeed JSON


def deepspeed_config(run: Run) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": run.zero}
    if run.zero == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        zero["stage3_param_persistence_threshold"] = 64
    if run.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if run.zero == 3:
            zero["offload_param"] = {"device": "cpu"}
    zero |= run.zero_extra
    return {
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": 1,
        "bf16": {"enabled": run.bf16 and not run.fp16}, "fp16": {"enabled": run.fp16},
        "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch AdamW: the CPU Adam operator takes minutes to compile
        **run.deepspeed_extra,
    }  # fmt: skip


def build_trainer(run: Run) -> Any:
    """A Trainer over random tokens; deterministic, so that two runs of the same `Run` are the same run."""
    import torch
    from transformers import Trainer, TrainingArguments

    from tests.guard import stack  # noqa: F401
    from tests.guard.stand_ins import fp16_without_its_instructions

    if run.fp16:
        fp16_without_its_instructions()
    arguments = TrainingArguments(
        output_dir=run.output_dir,
        per_device_train_batch_size=1,
        max_steps=run.steps,
        save_strategy="steps",
        save_steps=run.save_steps,
        save_only_model=run.save_only_model,
        save_total_limit=run.save_total_limit,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        bf16=run.bf16 and not run.fp16 and run.zero is not None,
        fp16=run.fp16,
        use_cpu=run.zero is None,
        optim=run.optim,
        learning_rate=1e-2,
        seed=7,
        deepspeed=None if run.zero is None else deepspeed_config(run),
        **run.extra,
    )
    torch.manual_seed(7)
    model = _model(run)
    if run.bf16:
        model = model.to(torch.float16 if run.fp16 else torch.bfloat16)
    if run.freeze:
        for part in (model.get_input_embeddings(), model.model.layers[0]):
            part.requires_grad_(False)
    if run.quantization_bit:
        model = _quantized(model, run)
    if run.buffer:
        model.model.register_buffer("scale_table", torch.arange(7, dtype=torch.float32))
    if run.lora or run.dora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=run.dora, task_type="CAUSAL_LM")
        )
    if run.max_shard_bytes:
        model.save_pretrained = _sharded(model.save_pretrained, run.max_shard_bytes)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5 if run.vision else 0, run.vocab, (8,), generator=generator) for _ in range(64)]
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]
    eval_data = data[:2] if "eval_strategy" in run.extra else None
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=eval_data)


def _model(run: Run) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    shape = {
        "vocab_size": run.vocab, "hidden_size": run.hidden, "intermediate_size": 2 * run.hidden,
        "num_hidden_layers": run.layers, "num_attention_heads": 2, "num_key_value_heads": run.kv_heads,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if not run.vision:
        return Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=run.tied))
    tower = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": run.hidden, "mlp_ratio": 2}
    tokens = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = Qwen2VLConfig(
        text_config={**shape, "rope_scaling": rope, "tie_word_embeddings": run.tied}, vision_config=tower,
        tie_word_embeddings=run.tied, **tokens,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


def _quantized(model: Any, run: Run) -> Any:
    """The model as bitsandbytes loads it; its blocks of 64 ask for a hidden size of at least 64."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = f"{run.output_dir}-base-{os.environ['RANK']}"
    model.save_pretrained(base)
    kind = (
        BitsAndBytesConfig(load_in_8bit=True)
        if run.quantization_bit == 8
        else BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16
        )
    )
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=kind, dtype=torch.bfloat16)


def _sharded(save_pretrained: Callable[..., Any], max_shard_bytes: int) -> Callable[..., Any]:
    def save(folder: str, **kwargs: Any) -> Any:
        return save_pretrained(folder, max_shard_size=max_shard_bytes, **kwargs)

    return save


def train(run: Run) -> dict[str, Any]:
    """The whole run as a user's script does it: train, then save_model. Returns a digest of the final weights."""
    if run.guarded:
        from dpofit.train import guard

        guard.install()
    trainer = build_trainer(run)
    trainer.train(resume_from_checkpoint=run.resume)
    if run.final_save:
        trainer.save_model()
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return {"step": trainer.state.global_step, "weights": fingerprint(trainer)}


def fingerprint(trainer: Any) -> str:
    """sha256 over this rank's ZeRO-3 partitions or replicated weights, in order."""
    import hashlib

    import torch

    digest = hashlib.sha256()
    for _, parameter in trainer.model.named_parameters():
        tensor = parameter
        if hasattr(parameter, "ds_tensor"):  # without the padding at the end, which is uninitialised memory
            rank, size = torch.distributed.get_rank(), parameter.ds_tensor.numel()
            tensor = parameter.ds_tensor[: max(0, min(size, parameter.ds_numel - rank * size))]
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights(folder: str | Path) -> dict[str, Any]:
    """Every tensor of a checkpoint's safetensors files, by name."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found.update(load_file(path))
    return found


def file_bytes(folder: str | Path, pattern: str) -> dict[str, bytes]:
    """Name → content of the files matching `pattern`."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob(pattern))}


__all__ = ["Run", "build_trainer", "file_bytes", "fingerprint", "os", "train", "weights"]
