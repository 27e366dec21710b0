"""What LLaMA-Factory's example DeepSpeed files set, so that a recipe naming one can be planned away from its checkout.

Only the settings, as facts: examples/deepspeed of LLaMA-Factory, compared key by key at v0.9.5 and at ff6d4d1.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    ),
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
}
_BELOW_3 = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
_AT_3 = {
    "stage": 3,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_PINNED_CPU = {"device": "cpu", "pin_memory": True}
_ZERO = {
    "ds_z0_config.json": {"stage": 0, **_BELOW_3},
    "ds_z2_config.json": {"stage": 2, **_BELOW_3},
    "ds_z2_offload_config.json": {"stage": 2, "offload_optimizer": _PINNED_CPU, **_BELOW_3},
    "ds_z3_config.json": _AT_3,
    "ds_z3_offload_config.json": {**_AT_3, "offload_optimizer": _PINNED_CPU, "offload_param": _PINNED_CPU},
}
EXAMPLES: dict[str, dict[str, Any]] = {name: {**_COMMON, "zero_optimization": zero} for name, zero in _ZERO.items()}
EXAMPLES["ds_z2_autotp_config.json"] = {**EXAMPLES["ds_z2_config.json"], "tensor_parallel": {"autotp_size": 2}}
EXAMPLES["ds_z3_fp8_config.json"] = {
    **{key: value for key, value in _COMMON.items() if key != "train_batch_size"},
    "zero_force_ds_cpu_optimizer": True,
    "fp16": {**_COMMON["fp16"], "enabled": False},
    "zero_optimization": {
        **_AT_3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "reduce_bucket_size": 12_845_056,
        "stage3_prefetch_bucket_size": 11_560_550,
        "stage3_param_persistence_threshold": 35_840,
    },
    "steps_per_print": 10_000_000,
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
}
