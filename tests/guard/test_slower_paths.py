"""Where ranks can't write their own slices the guard says so once, takes a slower way, and the files are the same."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from dpofit.train.guard.check import check_checkpoint
from tests.guard.ranks import run_ranks, values
from tests.guard.runs import Run
from tests.guard.test_same_as_native import compare

pytestmark = pytest.mark.stack

MICS = {"mics_shard_size": 1}  # each rank a shard group of its own
AUTOTP = {"tensor_parallel": {"autotp_size": 2}}


def nvme(folder: Path) -> dict[str, Any]:
    """Parameters in files; only partitions of 1 MiB and more are swapped (0.18.4 swap_tensor/utils.py:16).

    Without prefetching: with it DeepSpeed 0.18.4 itself fails in the second step ("already assigned swap buffer").
    """
    place = {"device": "nvme", "nvme_path": str(folder / "nvme"), "max_in_cpu": 0}
    buffers = {"buffer_size": 1_000_000, "buffer_count": 8}
    return {"offload_param": place | buffers, "stage3_prefetch_bucket_size": 0}


def train_and_save_both_ways(run: Run, native: str, guarded: str) -> list[str]:
    """Checkpoints and a final model by the guard, then the stock code's; returns what the guard warned of here."""
    import torch

    from dpofit.train import guard
    from tests.guard import stand_ins
    from tests.guard.runs import build_trainer

    if "mics_shard_size" in run.zero_extra:
        stand_ins.coalesced_gathers_for_gloo()
    if "offload_param" in run.zero_extra:
        stand_ins.nvme_without_libaio()
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dpofit.guard").addHandler(handler)
    guard.install()
    trainer = build_trainer(run)
    trainer.train()
    trainer.save_model(guarded)
    guard.uninstall()
    trainer.save_model(native)
    torch.distributed.barrier()
    return said


@pytest.mark.parametrize(
    ("kind", "backend", "reason"),
    [
        ("nvme", "gather", "partitions are on NVMe"),
        ("mics", "gather", "partitions don't span all ranks (MiCS, or a subset of the world)"),
        ("autotp", "native-safe", "AutoTP splits tensors"),
    ],
)
def test_it_says_so_once_on_rank_0_and_every_save_is_whole(
    tmp_path: Path, kind: str, backend: str, reason: str
) -> None:
    fields: dict[str, Any] = {
        "nvme": {"zero_extra": nvme(tmp_path), "vocab": 8192, "hidden": 128},
        "mics": {"zero_extra": MICS},
        "autotp": {"zero": 1, "kv_heads": 2, "vocab": 260, "deepspeed_extra": AUTOTP},
    }[kind]
    run = Run(str(tmp_path / "run"), steps=2, **fields)
    native, guarded = tmp_path / "native", tmp_path / "guarded"
    first, second = values(run_ranks(train_and_save_both_ways, 2, run, str(native), str(guarded)))
    rows = [json.loads(line) for line in (tmp_path / "run" / "dpofit" / "saves.jsonl").read_text().splitlines()]
    assert [(row["step"], row["backend"], row["reason"]) for row in rows] == [
        (step, backend, reason) for step in (1, 2, None)
    ]
    assert len(first) == 1 and reason in first[0] and backend in first[0]
    assert second == []
    compare(native, guarded)
    for folder in (tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-2", guarded):
        assert [finding for finding in check_checkpoint(folder) if finding.severity == "error"] == []


def quantized(zero: int | None, bits: int, dora: bool = False) -> Run:
    return Run("", zero=zero, hidden=64, lora=not dora, dora=dora, quantization_bit=bits, steps=1, save_steps=100)


QUANTIZED = [quantized(2, 4)]
if os.environ.get("DPOFIT_TEST_ALL"):
    QUANTIZED += [quantized(3, 4), quantized(None, 4), quantized(1, 4), quantized(2, 8), quantized(2, 4, dora=True)]


@pytest.mark.parametrize("run", QUANTIZED, ids=lambda run: f"zero {run.zero}, {run.quantization_bit} bits")
def test_adapters_on_a_quantized_base_need_no_slower_way(tmp_path: Path, run: Run) -> None:
    from dataclasses import replace

    native, guarded = tmp_path / "native", tmp_path / "guarded"
    here = replace(run, output_dir=str(tmp_path / "run"))
    assert values(run_ranks(train_and_save_both_ways, 2, here, str(native), str(guarded))) == [[], []]
    compare(native, guarded)
    assert (guarded / "adapter_model.safetensors").exists() and not (guarded / "model.safetensors").exists()
    assert '"backend": "direct"' in (tmp_path / "run" / "dpofit" / "saves.jsonl").read_text()
