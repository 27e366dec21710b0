"""The measured process: LLaMA-Factory's `run_exp` through dpofit's own entry, read at the edges of every step.

`python -m benchmarks.measure_gpu.inside RECIPE READINGS.json [SNAPSHOT.json.gz]`
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(recipe: str, readings: Path, snapshot: Path | None) -> None:
    """Run the recipe; whatever happens, what was read until then is in `readings` afterwards."""
    # First of all: it mends transformers' package lookup, which trl asks while it is imported.
    import llamafactory.extras.packages  # noqa: F401
    import torch
    from transformers import TrainerCallback

    from dpofit.train import entry, hooks
    from dpofit.train.hooks import Hook
    from dpofit.train.memory_log import nvml_used_bytes

    cuda = torch.cuda.is_available()
    steps: list[dict[str, Any]] = []
    batches: list[list[int]] = []
    error: Exception | None = None
    if cuda and snapshot is not None:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=2_000_000)

    def now() -> dict[str, Any]:
        """Where the card stands; torch's peaks are those since MemoryLog read them, at the end of the last step."""
        if not cuda:
            return {"time": time.monotonic()}
        torch.cuda.synchronize()
        return {
            "time": time.monotonic(),
            "allocated_bytes": torch.cuda.memory_allocated(),
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            "nvml_bytes": nvml_used_bytes(),
            "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        }

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append({"begin": now()})

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps[-1]["before_optimizer"] = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps[-1]["end"] = now()

    def watched(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.callback_handler.callbacks.insert(0, Steps())  # before MemoryLog, which resets the peaks
            return train(trainer, *args, **kwargs)

        return run

    def noted(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batches.append(list(inputs["input_ids"].shape))
            return step(trainer, model, inputs, *args, **kwargs)

        return run

    hooks.install(
        [
            Hook("measure", "transformers.trainer:Trainer.train", watched),
            Hook("measure", "transformers.trainer:Trainer.training_step", noted),
            # Saving is not measured, and would write the model once a job.
            Hook("measure", "transformers.trainer:Trainer.save_model", lambda stock: _no_save, order=1000),
        ]
    )
    try:
        entry.main([recipe])
    except Exception as failure:  # not SystemExit: bad input, whose words stand in the log
        error = failure
        raise
    finally:
        document = {
            "steps": steps,
            "batches": batches,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "out_of_memory": isinstance(error, torch.OutOfMemoryError),
            **_host(torch, cuda),
        }
        readings.write_text(json.dumps(document), encoding="utf-8")
    if cuda and snapshot is not None:
        from .snapshot import write_record

        reserved_peak = max(reading["reserved_peak_bytes"] for step in steps for reading in step.values())
        write_record(snapshot, torch.cuda.memory._snapshot()["device_traces"][0], reserved_peak)


def _no_save(trainer: Any, *args: Any, **kwargs: Any) -> None:
    """In place of save_model."""


def _host(torch: Any, cuda: bool) -> dict[str, int | None]:
    """Host memory of this process at its highest; pinned: torch's own cache of it, None without CUDA."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak") if cuda else None
    return {"host_rss_peak_bytes": int(status["VmHWM"].split()[0]) * 1024, "host_pinned_peak_bytes": pinned}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
