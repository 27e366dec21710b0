"""Reads the part of a DeepSpeed config that decides memory (deepspeed 0.18.4 runtime/zero/config.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpofit.recipe.deepspeed import DeepSpeedConfig
from dpofit.recipe.issue import Issue
from dpofit.recipe.keys import deepspeed_keys, nearest, words
from dpofit.recipe.recipe import Auto, Offload, ZeroConfig

# transformers fills these three from the model's hidden size, under exactly these names (integrations/deepspeed.py,
# trainer_config_finalize); any other "auto" is dropped and DeepSpeed's default holds (config_utils.py 56).
FILLED_FROM_MODEL = frozenset(
    {"reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}
)
# Sections that cannot change memory.
_HARMLESS_SECTIONS = words(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    zero_allow_untested_optimizer steps_per_print wall_clock_breakdown dump_state memory_breakdown comms_logger
    tensorboard wandb csv_monitor comet flops_profiler scheduler prescale_gradients
    gradient_predivide_factor checkpoint aio autotuning elasticity nebula seed activation_checkpointing timers
    data_types fp16 bf16 zero_optimization
    """
)
# Sections DeepSpeed knows and the memory model does not.
_MEMORY_SECTIONS = words(
    """
    optimizer amp sparse_gradients sparse_attention communication_data_type
    seq_parallel_communication_data_type tensor_parallel pipeline compression_training data_efficiency
    curriculum_learning hybrid_engine compile zero_force_ds_cpu_optimizer torch_autocast sequence_parallel_size
    eigenvalue progressive_layer_drop disable_allgather weight_quantization
    use_data_before_expert_parallelism zenflow
    """
)
# Keys of the fp16 and bf16 sections that change what is kept or when (runtime/precision_config.py).
_PRECISION_MEMORY_KEYS = words(
    """
    auto_cast fp16_master_weights_and_grads immediate_grad_update bf16_master_weights_and_grads
    bf16_optimizer_states
    """
)
# ZeRO settings read below, and ones that cannot change memory.
_ZERO_READ = words(
    """
    stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size
    prefetch_bucket_size param_persistence_threshold max_live_parameters max_reuse_distance sub_group_size
    gather_16bit_weights_on_model_save round_robin_gradients offload_optimizer offload_param
    """
)
_ZERO_HARMLESS = words(
    """
    load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1 log_trace_cache_warnings
    enable_sanity_checks override_module_apply cpu_offload_use_pin_memory pipeline_loading_checkpoint
    """
)
_OFFLOAD_HARMLESS = frozenset({"nvme_path", "cpuadam_cores_perc"})
_RENAMED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass(slots=True)
class _Reading:
    """Collects what reading one config turns up."""

    where: str
    issues: list[Issue] = field(default_factory=list)
    other_keys: list[str] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)

    def bad(self, id: str, key: str, wrong: str, right: str) -> None:
        self.issues.append(Issue(id, self.where, key, wrong, right))


def zero_config(found: DeepSpeedConfig) -> tuple[ZeroConfig, tuple[str, ...], list[Issue]]:
    """The typed ZeRO settings, the dotted keys present that may change memory unmodelled, and every issue."""
    reading = _Reading(found.source)
    zero = _zero_section(found.config, reading)
    stage = _number(zero, "stage", reading, 0)
    if stage not in (0, 1, 2, 3):
        reading.bad("config.deepspeed-value", "zero_optimization.stage", f"is {stage!r}", "Choose 0, 1, 2 or 3.")
        stage = 0
    optimizer = _offload(zero, "offload_optimizer", reading)
    param = _offload(zero, "offload_param", reading)
    _other_sections(found.config, reading)
    config = ZeroConfig(
        source=found.source,
        stage=int(stage),
        offload_optimizer=_device(optimizer, "offload_optimizer", reading),
        offload_param=_device(param, "offload_param", reading),
        optimizer_pin_memory=_switch(optimizer, "pin_memory", reading, False),
        param_pin_memory=_switch(param, "pin_memory", reading, False),
        overlap_comm=_switch(zero, "overlap_comm", reading, stage == 3),
        contiguous_gradients=_switch(zero, "contiguous_gradients", reading, True),
        reduce_scatter=_switch(zero, "reduce_scatter", reading, True),
        reduce_bucket_size=_number(zero, "reduce_bucket_size", reading),
        allgather_bucket_size=_number(zero, "allgather_bucket_size", reading),
        prefetch_bucket_size=_number(zero, "prefetch_bucket_size", reading),
        param_persistence_threshold=_number(zero, "param_persistence_threshold", reading),
        max_live_parameters=_number(zero, "max_live_parameters", reading),
        max_reuse_distance=_number(zero, "max_reuse_distance", reading),
        sub_group_size=_number(zero, "sub_group_size", reading),
        gather_16bit_weights_on_save=_switch(zero, "gather_16bit_weights_on_model_save", reading, False),
        round_robin_gradients=_switch(zero, "round_robin_gradients", reading, False),
        grad_accum_dtype=_grad_accum_dtype(found.config),
        other_keys=tuple(sorted(reading.other_keys)),
    )
    _stage_issues(config, optimizer, reading)
    return config, tuple(sorted(reading.unmodelled)), reading.issues


def _zero_section(config: Mapping[str, Any], reading: _Reading) -> dict[str, Any]:
    """The section with every spelling turned into its field's name, `auto` kept only where it gets filled."""
    section = config.get("zero_optimization", {})
    if isinstance(
        section, bool
    ):  # deprecated form: true is stage 1 (runtime/zero/config.py read_zero_config_deprecated)
        return {"stage": 1 if section else 0}
    if not isinstance(section, Mapping):
        reading.bad("config.deepspeed-value", "zero_optimization", "is not an object", "Give it keys.")
        return {}
    known = deepspeed_keys("zero_optimization")
    zero: dict[str, Any] = {}
    for key, value in section.items():
        path = f"zero_optimization.{key}"
        if key not in known:
            if value != "auto":
                reading.bad(
                    "config.deepspeed-key", path, "is not a key of DeepSpeed's ZeRO", _instead(key, list(known))
                )
            continue
        name = known[key].field
        if value == "auto" and key not in FILLED_FROM_MODEL:
            continue
        if key in _RENAMED:
            zero.setdefault(_RENAMED[key], {"device": "cpu"} if value else None)
        elif key == "stage3_gather_fp16_weights_on_model_save":
            zero["gather_16bit_weights_on_model_save"] = value
        else:
            zero[name] = value
            if name not in _ZERO_READ:
                reading.other_keys.append(path)
                if name not in _ZERO_HARMLESS and value != known[key].default:
                    reading.unmodelled.append(f"deepspeed.{path}")
    return zero


def _offload(zero: Mapping[str, Any], section: str, reading: _Reading) -> dict[str, Any]:
    asked = zero.get(section)
    if asked is None:
        return {}
    path = f"zero_optimization.{section}"
    if not isinstance(asked, Mapping):
        reading.bad("config.deepspeed-value", path, "is not an object", 'Write {"device": "cpu", "pin_memory": true}.')
        return {}
    known = deepspeed_keys(section)
    offload = {}
    for key, value in asked.items():
        if key not in known:
            if value != "auto":
                reading.bad(
                    "config.deepspeed-key",
                    f"{path}.{key}",
                    "is not a key of DeepSpeed's offload",
                    _instead(key, list(known)),
                )
        elif value != "auto":
            offload[key] = value
            if key not in ("device", "pin_memory"):
                reading.other_keys.append(f"{path}.{key}")
                if key not in _OFFLOAD_HARMLESS and value != known[key].default:
                    reading.unmodelled.append(f"deepspeed.{path}.{key}")
    return offload


def _device(offload: Mapping[str, Any], section: str, reading: _Reading) -> Offload:
    device = offload.get("device", "none")
    if device == "none" or device is None:
        return "none"
    if device == "cpu":
        return "cpu"
    if device == "nvme":
        return "nvme"
    reading.bad(
        "config.deepspeed-value", f"zero_optimization.{section}.device", f"is {device!r}", "Choose none, cpu or nvme."
    )
    return "none"


def _number(zero: Mapping[str, Any], name: str, reading: _Reading, default: Any = None) -> int | Auto:
    """A whole number (5e8 counts, so does text of digits: pydantic converts it), or `auto` where that stays."""
    if default is None:
        default = deepspeed_keys("zero_optimization")[name].default
    value = zero.get(name, default)
    if value == "auto":
        return "auto"
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != number // 1 or not 0 <= number < 2**63:
        reading.bad(
            "config.deepspeed-value", f"zero_optimization.{name}", f"is {value!r}", "Give a whole number, 0 or more."
        )
        return int(default)
    return int(number)


def _switch(section: Mapping[str, Any], name: str, reading: _Reading, default: bool) -> bool:
    value = section.get(name)
    if value is None:
        return default
    said = {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())
    if said is None:
        reading.bad("config.deepspeed-value", f"zero_optimization.{name}", f"is {value!r}", "Write true or false.")
        return default
    return said


def _grad_accum_dtype(config: Mapping[str, Any]) -> str | None:
    section = config.get("data_types")
    asked = section.get("grad_accum_dtype") if isinstance(section, Mapping) else None
    return None if asked in (None, "auto") else str(asked)


def _other_sections(config: Mapping[str, Any], reading: _Reading) -> None:
    """Every section beside ZeRO: harmless, unmodelled, or unknown to DeepSpeed."""
    for name, value in ((str(name), value) for name, value in config.items()):
        if name.startswith("_") or name == "zero_optimization":
            continue
        if name not in _HARMLESS_SECTIONS | _MEMORY_SECTIONS:
            known = sorted(_HARMLESS_SECTIONS | _MEMORY_SECTIONS)
            reading.bad("config.deepspeed-ignored-key", name, "is not a section DeepSpeed reads", _instead(name, known))
            continue
        reading.other_keys.append(name)
        harmless_value = value == (name == "zero_force_ds_cpu_optimizer") or value in (None, "auto", {})
        if name in _MEMORY_SECTIONS and not harmless_value:
            reading.unmodelled.append(f"deepspeed.{name}")
    for name in ("fp16", "bf16"):
        section = config.get(name)
        for key, value in section.items() if isinstance(section, Mapping) else ():
            if key in _PRECISION_MEMORY_KEYS and value:
                reading.unmodelled.append(f"deepspeed.{name}.{key}")


def _stage_issues(config: ZeroConfig, optimizer: Mapping[str, Any], reading: _Reading) -> None:
    if config.stage < 3 and config.offload_param != "none":
        key = "zero_optimization.offload_param"
        reading.bad(
            "config.offload-param-stage", key, f"does nothing at stage {config.stage}", "Use stage 3, or remove it."
        )
    ratio = optimizer.get("ratio", 1.0)
    if config.stage != 3 and isinstance(ratio, (int, float)) and ratio < 1:
        key = "zero_optimization.offload_optimizer.ratio"
        reading.bad(
            "config.partial-offload-stage", key, f"is {ratio} at stage {config.stage}", "Use stage 3, or remove it."
        )
    if config.stage == 3 and not config.gather_16bit_weights_on_save:
        key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        reading.bad(
            "config.zero3-gather", key, "is off", "Set it to true, or convert checkpoints with zero_to_fp32.py."
        )


def _instead(name: str, known: list[str]) -> str:
    close = nearest(name, known)
    return f"Did you mean {close}?" if close else "Remove it."
