"""The gathers and releases traced over fake tensors are those of the real DeepSpeed engine on two CPU ranks."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent


def _request(**changes):
    from dpofit.trace.request import TraceRequest

    zero = {
        "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
    } | changes.get("zero", {})  # fmt: skip
    defaults = {
        "model_type": "qwen2", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "layers": 3, "heads": 4,
        "kv_heads": 2, "head_dim": 16, "tied_embeddings": False, "rows": 2, "tokens": 16, "attention": "eager",
        "world_size": 2, "steps": 3, "deepspeed": {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False},
    }  # fmt: skip
    changes.pop("zero", None)
    return TraceRequest(**(defaults | changes))


CASES = {
    "tied, nothing reused": {"tied_embeddings": True, "zero": {"stage3_max_reuse_distance": 0}},
    "small prefetch and live limit": {
        "layers": 4,
        "zero": {
            "stage3_prefetch_bucket_size": 9000,
            "stage3_max_live_parameters": 40000,
            "stage3_max_reuse_distance": 20000,
            "stage3_param_persistence_threshold": 100,
        },
    },
    "llama, adapters": {"model_type": "llama", "finetuning": "lora", "lora_rank": 4},
    "offloaded, accumulating": {
        "micro_batches": 2,
        "zero": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    },
}
if os.environ.get("DPOFIT_TEST_ALL"):
    CASES |= {
        "auto keys": {},
        "nothing persists, is kept or fetched far ahead": {
            "zero": {
                "stage3_prefetch_bucket_size": 500,
                "stage3_max_live_parameters": 10000,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 0,
            },
        },
        "qwen3, no checkpointing, no prefetch": {
            "model_type": "qwen3",
            "checkpointing": "none",
            "zero": {"stage3_prefetch_bucket_size": 0},
        },
        "adapters, nothing kept": {
            "finetuning": "lora",
            "zero": {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0},
        },
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Every case on one pair of ranks."""
    folder = tmp_path_factory.mktemp("zero3")
    requests = [dataclasses.asdict(_request(**changes)) for changes in CASES.values()]
    (folder / "requests.json").write_text(json.dumps(requests))
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port),
        str(HERE / "zero3_worker.py"), str(folder / "requests.json"), str(folder / "out.json"),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads((folder / "out.json").read_text()), strict=True))


def _traced(request):
    from dpofit.trace.sequence import record_sequence
    from dpofit.trace.step import trace_step

    logs = {"policy": [], "reference": []}

    def observe(trainer):
        record_sequence(trainer.model, logs["policy"])
        if trainer.ref_model is not None:
            record_sequence(trainer.ref_model, logs["reference"])

    steps = []

    def stepped():
        steps.append({who: list(log) for who, log in logs.items()})
        for log in logs.values():
            log.clear()

    trace_step(request, observe, stepped)
    return json.loads(json.dumps(steps))


@pytest.mark.parametrize("case", CASES)
def test_every_gather_and_release_from_step_2_is_the_real_engines(case, real):
    request = _request(**CASES[case])
    traced = _traced(request)
    assert traced[1:] == real[case][1:]
    assert sum(kind == "gather" for kind, *_ in traced[1]["policy"]) > request.layers
