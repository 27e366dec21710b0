"""Imports the training stack once, set up for DeepSpeed on CPU ranks; preloaded by the fork server."""

from __future__ import annotations

import gc
import os

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

from dpofit.train.cpu import COLLECTIVES, at_once  # noqa: E402

for _name in COLLECTIVES:
    if hasattr(TorchBackend, _name):
        setattr(TorchBackend, _name, at_once(getattr(TorchBackend, _name)))

import llamafactory.train.tuner  # noqa: E402, F401

# DeepSpeed collects garbage dozens of times while it starts; what the server imported need not be looked at again.
gc.collect()
gc.freeze()
