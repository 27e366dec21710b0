"""A guarded save writes what the stock save writes: same files, same bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.guard.ranks import run_ranks, values
from tests.guard.runs import Run

pytestmark = pytest.mark.stack

PADDED_TOTALS = ("total_size", "total_parameters")  # wrong in the stock index under ZeRO-3


def save_both_ways(run: Run, native: str, guarded: str) -> str:
    """One engine, one set of weights, saved by the stock code and by the guard. Returns the guard's backend."""
    import torch

    from dpofit.train import guard
    from tests.guard.runs import build_trainer

    guard.uninstall()
    trainer = build_trainer(run)
    trainer.train()
    trainer.save_model(native)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    guard.install()
    trainer.save_model(guarded)
    if trainer.args.process_index != 0:
        return ""
    return json.loads((Path(run.output_dir) / "dpofit" / "saves.jsonl").read_text().splitlines()[-1])["backend"]


def compare(native: Path, guarded: Path) -> None:
    ours = {path.name for path in guarded.iterdir()} - {"dpofit-manifest.json"}
    assert ours == {path.name for path in native.iterdir()}
    for path in native.iterdir():
        if path.name == "model.safetensors.index.json":
            assert index_without_totals(path) == index_without_totals(guarded / path.name)
        elif path.suffix in (".safetensors", ".json"):
            assert path.read_bytes() == (guarded / path.name).read_bytes(), path.name


def index_without_totals(path: Path) -> dict[str, Any]:
    index = json.loads(path.read_text())
    for total in PADDED_TOTALS:
        index["metadata"].pop(total, None)
    return index


def run_case(tmp_path: Path, world_size: int, env: dict[str, str] | None = None, **fields: Any) -> str:
    run = Run(str(tmp_path / "run"), steps=1, save_steps=100, **fields)
    native, guarded = tmp_path / "native", tmp_path / "guarded"
    backends = values(run_ranks(save_both_ways, world_size, run, str(native), str(guarded), env=env))
    compare(native, guarded)
    return backends[0]


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (1, {}),
        (2, {"tied": True}),
        (3, {"vocab": 251}),
        (2, {"offload": True, "buffer": True}),
        (3, {"tied": True, "bf16": False}),
    ],
    ids=["one rank", "two ranks, tied", "three ranks, odd vocabulary", "offloaded, with a buffer", "fp32"],
)
def test_zero3_files_are_byte_identical(tmp_path: Path, world_size: int, fields: dict[str, Any]) -> None:
    assert run_case(tmp_path, world_size, **fields) == "direct"


def test_shards_and_index_are_the_same(tmp_path: Path) -> None:
    # 32 KiB shards: several files; sizes chosen so that the stock code's padding moves no boundary
    assert run_case(tmp_path, 2, vocab=256, max_shard_bytes=32 * 1024) == "direct"
    assert len(list((tmp_path / "guarded").glob("model-*.safetensors"))) > 1


def test_the_index_counts_real_bytes_and_parameters(tmp_path: Path) -> None:
    run_case(tmp_path, 2, vocab=259, max_shard_bytes=32 * 1024)
    metadata = json.loads((tmp_path / "guarded" / "model.safetensors.index.json").read_text())["metadata"]
    # embedding, head 2·259·32; final norm 32; a layer: q 32·32+32, k, v 2·(32·16+16), o 32·32, MLP 3·32·64, norms 2·32
    parameters = 2 * 259 * 32 + 32 + 2 * (32 * 32 + 32 + 2 * (32 * 16 + 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32)
    assert metadata == {"total_parameters": parameters, "total_size": 2 * parameters}


@pytest.mark.parametrize("zero", [0, 1, 2, None], ids=["zero 0", "zero 1", "zero 2", "no deepspeed"])
def test_replicated_weights_are_byte_identical(tmp_path: Path, zero: int | None) -> None:
    assert run_case(tmp_path, 2, zero=zero, tied=zero == 2) == "direct"


@pytest.mark.parametrize("fields", [{"lora": True}, {"dora": True}, {"lora": True, "zero": 2}], ids=str)
def test_only_the_adapter_is_saved(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert run_case(tmp_path, 2, **fields) == "direct"
    assert (tmp_path / "guarded" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "guarded" / "model.safetensors").exists()


ODD_MODELS: list[dict[str, Any]] = [{"freeze": True}, {"vision": True}]
if os.environ.get("DPOFIT_TEST_ALL"):
    ODD_MODELS += [{"vision": True, "tied": True, "zero": 2}]


@pytest.mark.parametrize("fields", ODD_MODELS, ids=str)
def test_frozen_layers_and_vision_towers_are_saved_like_the_rest(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert run_case(tmp_path, 2, **fields) == "direct"
    from tests.guard.runs import weights

    if "vision" in fields:
        assert any("visual" in name for name in weights(tmp_path / "guarded"))


@pytest.mark.parametrize("backend", ["routed", "gather", "native-safe"])
def test_every_backend_writes_the_same_bytes(tmp_path: Path, backend: str) -> None:
    assert run_case(tmp_path, 3, env={"DPOFIT_GUARD": backend}, tied=backend == "gather") == backend


def test_secondary_shards_inside_a_node_change_nothing(tmp_path: Path) -> None:
    assert run_case(tmp_path, 2, zero_extra={"zero_hpz_partition_size": 2}) == "direct"


def why_not_direct(run: Run) -> list[str]:
    """What the guard says of a real ZeRO-3 partition in the states that DeepSpeed can leave it in on a GPU node."""
    import torch
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    from dpofit.train.guard.sources import NotDirect, span
    from tests.guard.runs import build_trainer

    trainer = build_trainer(run)
    trainer.train()
    parameter: Any = max(trainer.model.parameters(), key=lambda each: each.ds_numel)
    partition = parameter.ds_tensor
    said = []

    def ask() -> None:
        try:
            said.append(str(span(parameter, 0, 1)))
        except NotDirect as reason:
            said.append(str(reason))

    ask()
    partition.status = PartitionedParamStatus.NOT_AVAILABLE  # NVMe offload: swapped out
    ask()
    partition.status = PartitionedParamStatus.AVAILABLE
    partition.ds_numel //= 2  # MiCS: a shard group smaller than the world
    ask()
    partition.ds_numel *= 2
    partition.data = partition.data.to(torch.int8)  # zero_quantized_weights
    ask()
    return said


def test_partitions_elsewhere_or_in_another_form_are_left_to_gather(tmp_path: Path) -> None:
    (said,) = values(run_ranks(why_not_direct, 1, Run(str(tmp_path / "run"), steps=1, save_steps=100)))
    assert said == [
        f"(0, {259 * 32 * 2})",
        "partitions are on NVMe",
        "partitions don't span all ranks (MiCS, or a subset of the world)",
        "partitions are quantized",
    ]
