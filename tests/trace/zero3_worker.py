"""One rank of real ZeRO-3 runs on the CPU: writes each engine's gathers and releases, step by step, as JSON.

torchrun --nproc_per_node 2 zero3_worker.py REQUESTS.json OUT.json
"""

# ruff: noqa: E402  the environment is set before deepspeed is imported
import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"

import torch.distributed as dist

dist.init_process_group("gloo")

import deepspeed
import llamafactory.train.tuner  # noqa: F401

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dpofit.trace.request import TraceRequest
from dpofit.trace.sequence import record_sequence
from dpofit.trace.step import build_models, make_trainer, run_step
from dpofit.trace.storages import Recorder

runs = []
for values in json.loads(Path(sys.argv[1]).read_text()):
    for name in ("lora_target", "transformers"):
        values[name] = tuple(values[name])
    request = TraceRequest(**values)
    trainer, optimizer = make_trainer(request, *build_models(request, None))
    steps = []
    logs = {"policy": [], "reference": []}
    record_sequence(trainer.model, logs["policy"])
    if trainer.ref_model is not None:
        record_sequence(trainer.ref_model, logs["reference"])
    for _ in range(request.steps):
        run_step(request, trainer, optimizer, Recorder())
        steps.append({who: list(log) for who, log in logs.items()})
        for log in logs.values():
            log.clear()
    runs.append(steps)
    unset_hf_deepspeed_config()  # or transformers would build the next model partitioned
dist.barrier()
if dist.get_rank() == 0:
    Path(sys.argv[2]).write_text(json.dumps(runs))
dist.barrier()
dist.destroy_process_group()
