"""Measures saves of one model by the guard, the stock code and others: time, peak extra memory, page cache left.

    python benchmarks/save.py weights --millions 1000     # weights: guard, stock, accelerate, torch DCP's HF writer
    python benchmarks/save.py checkpoint --millions 300   # a whole checkpoint with AdamW states: guard, stock

Two CPU ranks under ZeRO-3. Each writer saves `--rounds` times; every round is kept, the median is printed. Results go
to benchmarks/results/save-<what>-<millions>m.json. Absolute speeds belong to the machine; the ratios are the point.
torchsnapshot takes part where it is installed; it writes each rank's partitions in a format of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SNAPSHOT = ("torchsnapshot",) if importlib.util.find_spec("torchsnapshot") else ()
WRITERS = {
    "weights": ("guard", "stock", "accelerate", "dcp-hf", *SNAPSHOT),
    "checkpoint": ("guard", "stock", *SNAPSHOT),
}
RANKS = 2


def shape_of(millions: int) -> dict[str, int]:
    """A Qwen2-like decoder of about that many parameters: 12 h² a layer and two vocabulary matrices of 32,000 h."""
    hidden = 1024 if millions < 600 else 2048
    layers = max(1, round((millions * 1e6 - 2 * 32_000 * hidden) / (12 * hidden * hidden)))
    return {"hidden": hidden, "layers": layers}


def build(what: str, millions: int, folder: str) -> Any:
    """A Trainer whose DeepSpeed engine is up: for `weights` by an evaluation, for `checkpoint` by one AdamW step."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

    from tests.guard import stack  # noqa: F401  DeepSpeed on CPU ranks

    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=1, per_device_eval_batch_size=1, max_steps=1, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, bf16=True, deepspeed=config, optim="adamw_torch",
    )  # fmt: skip
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    shape = shape_of(millions)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32_000,
            hidden_size=shape["hidden"],
            intermediate_size=8 * shape["hidden"] // 3,
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["hidden"] // 64,
            num_key_value_heads=shape["hidden"] // 64,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )
    torch.set_default_dtype(torch.float32)
    row = torch.arange(8)
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for _ in range(4)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:2])
    trainer.train() if what == "checkpoint" else trainer.evaluate()
    gc.collect()
    return trainer


def write(trainer: Any, what: str, writer: str, folder: Path) -> None:
    """One save by one writer."""
    from dpofit.train import guard

    if writer in ("guard", "stock"):
        guard.install() if writer == "guard" else guard.uninstall()
        if what == "weights":
            trainer.save_model(str(folder))
        else:
            trainer.args.output_dir = str(folder)
            trainer._save_checkpoint(trainer.model, None)
    elif writer == "accelerate":
        trainer.accelerator.save_model(trainer.deepspeed, str(folder))
    elif writer == "torchsnapshot":
        import torch
        from torch.utils._pytree import tree_map
        from torchsnapshot import Snapshot, StateDict

        state = {"weights": {name: parameter.ds_tensor for name, parameter in trainer.model.named_parameters()}}
        if what == "checkpoint":
            state["optimizer"] = trainer.deepspeed.optimizer.state_dict()
        state = tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, state)
        Snapshot.take(str(folder), {"rank": StateDict(**state)})
    else:
        import torch.distributed.checkpoint as dcp

        state = trainer.deepspeed._zero3_consolidated_16bit_state_dict()
        if state is not None:
            storage = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=dict.fromkeys(state, 1))
            dcp.save(state, storage_writer=storage, no_dist=True)
            state.clear()  # or DeepSpeed's cycle keeps it: docs/deepspeed-save-leak.md


def measure(what: str, millions: int, folder: str, rounds: int) -> list[dict[str, Any]]:
    """All writers in turns on this rank."""
    import torch.distributed as dist

    trainer = build(what, millions, folder)
    rows = []
    for index in range(rounds):
        for writer in WRITERS[what]:
            place = Path(folder) / f"{writer}-{index}"
            gc.collect()
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")
            floor, started = status("VmRSS"), time.monotonic()
            write(trainer, what, writer, place)
            dist.barrier()
            returned = time.monotonic() - started
            peak = status("VmHWM") - floor
            files = [path for path in place.rglob("*") if path.is_file()] if dist.get_rank() == 0 else []
            cached = sum(resident(path) for path in files)
            for path in files:
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
            dist.barrier()
            rows.append(
                {
                    "writer": writer, "round": index,
                    "seconds": returned, "seconds_durable": time.monotonic() - started,
                    "peak_extra_bytes": peak, "page_cache_bytes": cached,
                    "written_bytes": sum(path.stat().st_size for path in files),
                }
            )  # fmt: skip
            if dist.get_rank() == 0:
                shutil.rmtree(place)
    return rows


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def resident(path: Path) -> int:
    """Bytes of the file in the page cache (mincore)."""
    if path.stat().st_size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as view:
        vector = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        address = ctypes.addressof(start := ctypes.c_char.from_buffer(view))
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), vector)
        del start
        return sum(byte & 1 for byte in bytes(vector)) * mmap.PAGESIZE


def summarise(per_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Median over rounds; peaks are the worst rank's, and the worst round's: one bad save kills a job."""
    table = []
    for writer in dict.fromkeys(row["writer"] for row in per_rank[0]):
        first = [row for row in per_rank[0] if row["writer"] == writer]
        everyone = [row for rows in per_rank for row in rows if row["writer"] == writer]
        table.append(
            {
                "writer": writer,
                "seconds": statistics.median(row["seconds"] for row in first),
                "seconds_durable": statistics.median(row["seconds_durable"] for row in first),
                "durable_against_guard": _ratio_to_guard(first, per_rank[0]),
                "peak_extra_bytes": max(row["peak_extra_bytes"] for row in everyone),
                "page_cache_bytes": statistics.median(row["page_cache_bytes"] for row in first),
                "written_bytes": first[0]["written_bytes"],
            }
        )
    return table


def _ratio_to_guard(rows: list[dict[str, Any]], everyone: list[dict[str, Any]]) -> float:
    """Median over rounds of durable seconds beside the guard's in the same round: what else ran then hit both."""
    guard = {row["round"]: row["seconds_durable"] for row in everyone if row["writer"] == "guard"}
    return statistics.median(row["seconds_durable"] / guard[row["round"]] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(WRITERS))
    parser.add_argument("--millions", type=int, required=True, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to save (a temporary folder by default)")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    from tests.guard.ranks import run_ranks, values

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        job = (arguments.what, arguments.millions, folder, arguments.rounds)
        per_rank = values(run_ranks(measure, RANKS, *job, timeout_s=1800))
    table = summarise(per_rank)
    print(f"{'writer':14}{'s':>8}{'durable s':>11}{'x guard':>9}{'extra MiB':>11}{'cache MiB':>11}{'written MB':>12}")
    for row in table:
        mib = (row["peak_extra_bytes"] / 2**20, row["page_cache_bytes"] / 2**20)
        seconds = f"{row['seconds']:8.1f}{row['seconds_durable']:11.1f}{row['durable_against_guard']:9.2f}"
        print(f"{row['writer']:14}{seconds}{mib[0]:11,.0f}{mib[1]:11,.0f}{row['written_bytes'] / 1e6:12,.0f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    libraries = ("torch", "deepspeed", "transformers", "accelerate", *SNAPSHOT)
    document = {
        "benchmark": "save", "what": arguments.what, "millions": arguments.millions, "ranks": RANKS,
        "shape": shape_of(arguments.millions), "date": datetime.date.today().isoformat(),
        "commit": commit.strip(),
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()},
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "summary": table, "rounds_by_rank": per_rank,
    }  # fmt: skip
    out = ROOT / "benchmarks" / "results" / f"save-{arguments.what}-{arguments.millions}m.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
