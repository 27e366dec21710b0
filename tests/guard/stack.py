"""Imports the training stack once, set up for DeepSpeed on CPU ranks; preloaded by the fork server."""

from __future__ import annotations

import functools
import gc
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import datasets  # noqa: F401
import deepspeed
import deepspeed.ops
import peft  # noqa: F401
import torch
import transformers
import transformers.trainer
import transformers.training_args

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids compiling an operator nobody needs here
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
if transformers.__version__.startswith("4."):
    # DeepSpeed drops LoRA's empty parameter group, the scheduler keeps a rate for it. torch 2.13 zips them strictly, so
    # LoRA under ZeRO can't train with this pair of versions; older torch let it pass, and so do we here.
    torch.optim.lr_scheduler.zip = lambda *rows, strict=False: zip(*rows, strict=False)  # type: ignore[attr-defined]
from deepspeed.comm.torch import TorchBackend  # noqa: E402
from transformers import Qwen2ForCausalLM  # noqa: E402, F401


def _finish_before_returning(name: str) -> None:
    # DeepSpeed waits for the last of several all-gathers only (0.18.4 partition_parameters.py:1968): enough for a CUDA
    # stream, a race with gloo's two threads. Waiting at once changes no result, only makes it come out every time.
    stock = getattr(TorchBackend, name)

    @functools.wraps(stock)
    def waited(*args: Any, **kwargs: Any) -> Any:
        handle = stock(*args, **kwargs)
        if hasattr(handle, "wait"):
            handle.wait()
        return handle

    setattr(TorchBackend, name, waited)


for _name in ("all_gather_into_tensor", "all_gather", "all_reduce", "reduce_scatter_tensor", "broadcast", "reduce"):
    if hasattr(TorchBackend, _name):
        _finish_before_returning(_name)

import llamafactory.train.tuner  # noqa: E402, F401

# DeepSpeed collects garbage dozens of times while it starts; what the server imported need not be looked at again.
gc.collect()
gc.freeze()
