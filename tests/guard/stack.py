"""Imports the training stack once, with the settings that make DeepSpeed run on CPU ranks; preloaded by the fork server."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import datasets  # noqa: E402, F401
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import peft  # noqa: E402, F401
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.trainer  # noqa: E402, F401
import transformers.training_args  # noqa: E402

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids compiling an operator nobody needs here
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
