"""Run in a process of its own: what LLaMA-Factory's own parser makes of recipe files, as JSON by file.

usage: parse_with_llamafactory.py PORT {"FILE": WORLD_SIZE, …}; run from the folder that holds deepspeed/.

A machine without GPUs, one rank standing for all: gloo instead of NCCL, DeepSpeed's CPU accelerator, and transformers
is told that the hardware does bf16; DeepSpeed's own shared-memory collectives stay off; unsloth, which wants a virtual
environment of its own (requirements-unsloth.txt), counts as installed. Nothing else is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def main() -> None:
    os.environ.update(RANK, MASTER_PORT=sys.argv[1], DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")
    files = json.loads(sys.argv[2])
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout is for the answer
        import deepspeed.ops
        import llamafactory.hparams.parser
        import torch.distributed
        import transformers.training_args

        # Else DeepSpeed compiles its shared-memory collectives first, and waits for whoever else does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

        check = llamafactory.hparams.parser.check_version
        llamafactory.hparams.parser.check_version = lambda requirement, mandatory=False: (
            requirement == "unsloth" or check(requirement, mandatory)
        )
        torch.distributed.init_process_group("gloo")
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        parsed = {file: parse(Path(file), world_size) for file, world_size in files.items()}
    print(json.dumps(parsed))


def parse(file: Path, world_size: int) -> dict[str, Any]:
    """The fields that dpofit reads, under dpofit's names, or `{"refused": reason}`."""
    from llamafactory.hparams import get_train_args, read_args

    # `llamafactory-cli` starts torchrun, which sets these, only when there is more than one GPU.
    for name, value in RANK.items():
        os.environ[name] = value
        if world_size == 1:
            del os.environ[name]
    sys.argv = ["train", str(file)]
    try:
        model, data, training, finetuning, _ = get_train_args(read_args())
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    deepspeed = training.hf_deepspeed_config.config if training.deepspeed else None
    zero = deepspeed["zero_optimization"] if deepspeed else None
    return {
        "parallel_mode": training.parallel_mode.value,
        "use_ref_model": finetuning.use_ref_model,
        "output_dir": training.output_dir,
        "ddp_timeout": training.ddp_timeout,
        "zero": zero
        and {
            "stage": zero["stage"],
            "offload_optimizer": zero.get("offload_optimizer", {}).get("device", "none"),
            "offload_param": zero.get("offload_param", {}).get("device", "none"),
        },
        "model": model.model_name_or_path,
        "stage": finetuning.stage,
        "finetuning": finetuning.finetuning_type,
        "micro_batch": training.per_device_train_batch_size,
        "eval_micro_batch": training.per_device_eval_batch_size,
        "gradient_accumulation": training.gradient_accumulation_steps,
        "cutoff_len": data.cutoff_len,
        "evaluates": training.do_eval,
        "packing": data.packing,
        "neat_packing": data.neat_packing,
        "pref_loss": finetuning.pref_loss,
        "pref_ftx": finetuning.pref_ftx,
        "ld_alpha": finetuning.ld_alpha,
        "ref_model": finetuning.ref_model,
        "lora_rank": finetuning.lora_rank,
        "lora_target": finetuning.lora_target,
        "lora_dropout": finetuning.lora_dropout,
        "additional_target": finetuning.additional_target or [],
        "use_dora": finetuning.use_dora,
        "quantization_bit": model.quantization_bit,
        "quantization_method": str(getattr(model.quantization_method, "value", model.quantization_method)),
        "quantization_type": model.quantization_type,
        "double_quantization": model.double_quantization,
        "bf16": training.bf16,
        "fp16": training.fp16,
        "pure_bf16": finetuning.pure_bf16,
        "upcast_layernorm": model.upcast_layernorm,
        "upcast_lmhead_output": model.upcast_lmhead_output,
        "gradient_checkpointing": not model.disable_gradient_checkpointing,
        "use_reentrant_gc": model.use_reentrant_gc,
        "use_unsloth": model.use_unsloth,
        "use_unsloth_gc": model.use_unsloth_gc,
        "liger": model.enable_liger_kernel,
        "flash_attn": str(getattr(model.flash_attn, "value", model.flash_attn)),
        "optim": str(getattr(training.optim, "value", training.optim)),
        "torch_empty_cache_steps": training.torch_empty_cache_steps,
        "save_only_model": training.save_only_model,
        "save_total_limit": training.save_total_limit,
        "saves": training.save_strategy.value != "no",
    }


if __name__ == "__main__":
    main()
