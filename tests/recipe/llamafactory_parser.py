"""Run inside the stack: feeds settings to LLaMA-Factory's own get_train_args and prints what each gave, as JSON.

stdin: a JSON list of settings. stdout, last line: a JSON list of {"error": text or null, and the values parsed}.
One rank of a gloo group stands for the cluster. A CPU has no bf16: the two availability checks answer as a GPU would.
"""

import gc
import json
import os
import socket
import sys


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


os.environ.update(
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=free_port(),
    DS_ACCELERATOR="cpu",
    DISABLE_VERSION_CHECK="1",
    LLAMAFACTORY_VERBOSITY="ERROR",
)

import deepspeed.ops  # noqa: E402
import llamafactory.hparams.parser as parser  # noqa: E402
import torch.distributed  # noqa: E402
import transformers.training_args  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nobody needs it here, and compiling it takes a minute
torch.distributed.init_process_group("gloo")
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
parser.is_torch_bf16_gpu_available = lambda: True

PARSED = {
    "model": (
        "adapter_name_or_path",
        "flash_attn",
        "use_unsloth_gc",
        "enable_liger_kernel",
        "quantization_bit",
        "disable_gradient_checkpointing",
        "use_reentrant_gc",
        "upcast_layernorm",
        "double_quantization",
    ),
    "data": ("cutoff_len", "packing", "val_size"),
    "training": (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "bf16",
        "fp16",
        "do_eval",
        "save_only_model",
        "save_total_limit",
        "torch_empty_cache_steps",
    ),
    "finetuning": (
        "stage",
        "finetuning_type",
        "lora_rank",
        "lora_target",
        "additional_target",
        "pref_loss",
        "pref_ftx",
        "use_dora",
        "use_rslora",
        "pure_bf16",
        "ref_model",
    ),
}


def parse(settings: dict) -> dict:
    try:
        model, data, training, finetuning, _ = parser.get_train_args(settings)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    groups = {"model": model, "data": data, "training": training, "finetuning": finetuning}
    values = {name: getattr(groups[group], name) for group, names in PARSED.items() for name in names}
    values["optim"] = training.optim.value
    values["save_strategy"] = training.save_strategy.value
    return {"error": None, **values}


results = []
for case in json.load(sys.stdin):
    results.append(parse(case))
    gc.collect()  # transformers remembers the DeepSpeed config of the last arguments object still alive
print(json.dumps(results))
