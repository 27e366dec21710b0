"""CPU ranks compute what GPU ranks compute: a collective has ended before the next thing reads its result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.runs import environment

pytestmark = pytest.mark.stack

# As DeepSpeed's `_allgather_params_coalesced`: many gathers at once, of which it waits for the last only.
GATHERS = """
import torch
import llamafactory.extras.packages
from dpofit.train.cpu import prepare

prepare(uses_deepspeed=True)
import deepspeed
from deepspeed import comm
deepspeed.init_distributed("gloo")
rank = comm.get_rank()
outputs = [torch.empty(2 * 2**22) for _ in range(8)]
handles = [comm.all_gather_into_tensor(out, torch.full((2**22,), float(rank)), async_op=True) for out in outputs]
for out, handle in zip(outputs, handles):
    assert handle.is_completed()
    assert (out.view(2, -1).mean(1) == torch.tensor([0.0, 1.0])).all()
scattered = [torch.empty(2**22) for _ in range(4)]
handles = [comm.reduce_scatter_fn(out, torch.ones(2 * 2**22), async_op=True) for out in scattered]
assert all((out == 2).all() for out in scattered), [out.mean() for out in scattered]
comm.barrier()
print("all in order", flush=True)
"""


def test_no_collective_of_deepspeed_is_in_flight_when_its_call_returns(tmp_path: Path) -> None:
    script = tmp_path / "gathers.py"
    script.write_text(GATHERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = environment(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all in order") == 2
