"""DeepSpeed's sizes with `auto` filled in as accelerate does, and what a gradient meets on its way to a partition."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.memory.job import Job
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.zero3 import CoordinatorConfig


@dataclass(frozen=True, slots=True)
class ZeroSizes:
    """Elements, except `gradient_bytes`: bytes of a gradient partition's element."""

    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_live: int
    max_reuse_distance: int
    sub_group: int
    gradient_bytes: int

    def coordinator(self) -> CoordinatorConfig:
        return CoordinatorConfig(
            self.prefetch_bucket, self.max_live, self.max_reuse_distance, self.persistence_threshold
        )


# The reference's engine: trl 0.24.0 models/utils.py:354-391 drops `auto` keys and dotted keys, so DeepSpeed's defaults
# (deepspeed 0.18.4 runtime/zero/config.py) hold.
REFERENCE_COORDINATOR = CoordinatorConfig(
    prefetch_bucket=50_000_000, max_live=1_000_000_000, max_reuse_distance=1_000_000_000, persistence_threshold=100_000
)


def zero_sizes(job: Job) -> ZeroSizes:
    """`auto` filled in from the hidden size (accelerate 1.11.0 accelerator.py _prepare_deepspeed; transformers 5.5.4
    integrations/deepspeed.py trainer_config_finalize)."""
    zero, hidden = job.zero, job.model.hidden_size

    def filled(value: int | str, automatic: int) -> int:
        return automatic if isinstance(value, str) else value

    return ZeroSizes(
        reduce_bucket=filled(zero.reduce_bucket_size, hidden * hidden),
        prefetch_bucket=filled(zero.prefetch_bucket_size, int(0.9 * hidden * hidden)),
        persistence_threshold=filled(zero.param_persistence_threshold, 10 * hidden),
        max_live=filled(zero.max_live_parameters, 1_000_000_000),
        max_reuse_distance=filled(zero.max_reuse_distance, 1_000_000_000),
        sub_group=filled(zero.sub_group_size, 1_000_000_000),
        gradient_bytes=FP32 if zero.grad_accum_dtype == "fp32" else BF16,
    )


def reference_coordinator(job: Job) -> CoordinatorConfig:
    """The reference engine keeps keys of the JSON that are numbers; `auto` ones fall to DeepSpeed's defaults."""
    zero, default = job.zero, REFERENCE_COORDINATOR

    def number(value: int | str, fallback: int) -> int:
        return fallback if isinstance(value, str) else value

    return CoordinatorConfig(
        prefetch_bucket=number(zero.prefetch_bucket_size, default.prefetch_bucket),
        max_live=number(zero.max_live_parameters, default.max_live),
        max_reuse_distance=number(zero.max_reuse_distance, default.max_reuse_distance),
        persistence_threshold=number(zero.param_persistence_threshold, default.persistence_threshold),
    )
