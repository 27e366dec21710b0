"""From a Job to its traced program: the second, independent route to the numbers of the memory room."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from dpofit.errors import BadInput, Problem
from dpofit.memory.job import Job
from dpofit.memory.partition import fullest_ranks
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.memory.program import Event, Phase, Program, Space
from dpofit.memory.scope import STAGES
from dpofit.memory.unsloth import unsloth_problems
from dpofit.models.family import FAMILIES
from dpofit.recipe.long_context import PIECES
from dpofit.recipe.recipe import Recipe, ZeroConfig
from dpofit.trace.optimizers import TRACED, missing_package, own_optimizer
from dpofit.trace.request import Attention, Checkpointing, TraceRequest

if TYPE_CHECKING:
    from dpofit.trace.storages import Mark, Recorder, Storage

STEPS = 2  # the first, which has no prefetch, and the steady one
_CONFIG_TYPES = tuple(name for name in FAMILIES if name != "qwen")  # Qwen 1 is code of its own repository


def trace_job(job: Job, rank: int = 0) -> Program:
    """Two training steps of `job`, from the real code. Raises BadInput naming everything the tracer doesn't do."""
    return trace_with_notes(job, rank)[0]


def trace_with_notes(job: Job, rank: int = 0) -> tuple[Program, tuple[str, ...]]:
    """The same, and what the traced code ran instead of what only a CUDA machine has, and what was extrapolated."""
    request = replace(request_of(job), rank=rank)
    with collector_off():
        from dpofit.trace.extrapolate import trace_deep  # torch

        traced = trace_deep(request)
        return program_of(traced.recorder, request), (*traced.substitutions, *_rank_note(job, rank))


def _rank_note(job: Job, rank: int) -> tuple[str, ...]:
    """ZeRO-1/2 ranks differ in the gradients they hold; the closed form is of whichever needs most at each moment."""
    if fullest_ranks(job) == (rank,):
        return ()
    most = " and ".join(str(one) for one in fullest_ranks(job))
    return (f"rank {rank} of {job.world_size}: most is held by {most}",)


@contextmanager
def collector_off() -> Iterator[None]:
    """Imports and traces make millions of objects that stay: Python would look through them for cycles all the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def request_of(job: Job) -> TraceRequest:
    """The job in the tracer's terms."""
    recipe, model = job.recipe, job.model
    problems = _unsupported(job)
    if problems:
        raise BadInput(problems)
    return TraceRequest(
        model_type=model.model_type,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        tied_embeddings=model.tied_embeddings,
        max_positions=model.max_positions,
        architecture=model.architecture_keys,
        quantization_bit=recipe.quantization_bit,
        double_quantization=recipe.double_quantization,
        rows=recipe.micro_batch * (2 if job.pairs else 1),
        tokens=job.lengths.row_tokens,
        stage=recipe.stage,
        pref_loss=recipe.pref_loss,
        pref_ftx=recipe.pref_ftx,
        ld_alpha=recipe.ld_alpha,
        finetuning=recipe.finetuning,
        ref_model=recipe.ref_model is not None,
        ref_quantization_bit=recipe.ref_model_quantization_bit,
        upcast_layernorm=recipe.upcast_layernorm,
        upcast_lmhead_output=recipe.upcast_lmhead_output,
        freeze_layers=recipe.freeze_layers,
        freeze_modules=recipe.freeze_modules,
        freeze_extra=recipe.freeze_extra,
        lora_rank=recipe.lora_rank,
        lora_target=recipe.lora_target,
        use_dora=recipe.use_dora,
        additional_target=recipe.additional_target,
        precision="deepspeed" if recipe.zero else "autocast" if job.autocast else "pure_bf16",
        checkpointing=_checkpointing(recipe),
        liger=recipe.liger,
        unsloth=recipe.use_unsloth,
        attention=_ATTENTION[job.flash_attn],
        padding=job.lengths.padded and not recipe.neat_packing,
        packed=recipe.neat_packing,
        micro_batches=min(recipe.gradient_accumulation, 2),  # the third is like the second
        steps=STEPS,
        optimizer=recipe.optim,
        own_optimizer=own_optimizer(recipe),
        weight_decay=recipe.weight_decay,
        world_size=job.world_size,
        deepspeed=_deepspeed(recipe.zero) if recipe.zero else {},
        transformers=_major_minor(job.stack.transformers),
        long_context=tuple(piece for piece in PIECES if job.on(piece)),
        answers=job.answer_tokens(job.rows),
        shared=(job.shared.prompt, job.shared.chosen, job.shared.rejected) if job.shared else None,
    )


_ATTENTION: dict[str, Attention] = {"auto": "sdpa", "sdpa": "sdpa", "fa2": "fa2", "disabled": "eager"}


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _checkpointing(recipe: Recipe) -> Checkpointing:
    if not recipe.gradient_checkpointing:
        return "none"
    if recipe.use_unsloth_gc:
        return "unsloth"
    return "reentrant" if recipe.use_reentrant_gc else "nonreentrant"


def _unsupported(job: Job) -> list[Problem]:
    recipe = job.recipe
    where = str(recipe.source)
    missing = missing_package(recipe)
    checks = [
        (job.model.model_type not in _CONFIG_TYPES, "model", job.model.model_type, ", ".join(_CONFIG_TYPES)),
        (recipe.stage not in STAGES, "stage", recipe.stage, ", ".join(STAGES)),
        (recipe.finetuning == "oft", "finetuning_type", recipe.finetuning, "full, freeze, lora"),
        (
            recipe.quantization_bit is not None and recipe.quantization_method != "bnb",
            "quantization_method",
            recipe.quantization_method,
            "bnb",
        ),
        (recipe.optim not in TRACED, "optim", recipe.optim, ", ".join(TRACED)),
        (recipe.flash_attn not in _ATTENTION, "flash_attn", recipe.flash_attn, ", ".join(_ATTENTION)),
        (recipe.fp16, "fp16", True, "bf16 or pure_bf16"),
        (any(unsloth_problems(recipe, job.model, job.world_size)), "use_unsloth", True, "false"),
        (missing is not None, "optim", f"an optimizer of {missing}, which isn't installed,", f"pip install {missing}"),
        (recipe.lora_dropout != 0 and recipe.stage == "sft", "lora_dropout", recipe.lora_dropout, "0"),
    ]
    return [Problem(where, key, f"{wrong} can't be traced", f"use {right}") for bad, key, wrong, right in checks if bad]


def _deepspeed(config: ZeroConfig) -> dict[str, Any]:
    """The DeepSpeed JSON again, from what was read of it."""
    zero: dict[str, Any] = {
        "stage": config.stage,
        "overlap_comm": config.overlap_comm,
        "contiguous_gradients": config.contiguous_gradients,
        "reduce_scatter": config.reduce_scatter,
        "reduce_bucket_size": config.reduce_bucket_size,
        "allgather_bucket_size": config.allgather_bucket_size,
        "round_robin_gradients": config.round_robin_gradients,
        "sub_group_size": config.sub_group_size,
    }
    if config.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": config.prefetch_bucket_size,
            "stage3_param_persistence_threshold": config.param_persistence_threshold,
            "stage3_max_live_parameters": config.max_live_parameters,
            "stage3_max_reuse_distance": config.max_reuse_distance,
        }
    if config.offload_optimizer != "none":
        pin = config.optimizer_pin_memory
        zero["offload_optimizer"] = {"device": config.offload_optimizer, "pin_memory": pin}
    if config.offload_param != "none":
        zero["offload_param"] = {"device": config.offload_param, "pin_memory": config.param_pin_memory}
    whole: dict[str, Any] = {"zero_optimization": zero}
    if config.grad_accum_dtype:
        whole["data_types"] = {"grad_accum_dtype": config.grad_accum_dtype}
    return whole


def program_of(recorder: Recorder, request: TraceRequest) -> Program:
    """The recorded births and deaths as a program: a storage's tag is its number, operation and module."""
    tags = [f"{s.index}:{s.op}:{s.module}" for s in recorder.storages]
    categories = [category_of(s, request) for s in recorder.storages]
    phases: list[Phase] = []
    items: list[Event] = []
    current = (recorder.marks[0].phase, recorder.marks[0].step)
    for mark in recorder.marks:
        if (mark.phase, mark.step) != current:
            phases.append(Phase(*current, tuple(items)))
            current, items = (mark.phase, mark.step), []
        tag, category = tags[mark.index], categories[mark.index]
        items.append(Event(tag, _block_bytes(mark), category, cast(Space, mark.space)))
    phases.append(Phase(*current, tuple(items)))
    return Program(tuple(phases))


def _block_bytes(mark: Mark) -> int:
    """What is taken for a birth, given back by a death: of pinned memory torch takes more than it is asked for."""
    if mark.space != "host_pinned":
        return mark.size_bytes
    block = pinned_block_bytes(abs(mark.size_bytes))
    return block if mark.size_bytes > 0 else -block


_DEEPSPEED_CATEGORIES = {
    # innermost deepspeed function that asked for the storage -> category
    "all_gather_coalesced": "gathered",
    "_all_gather_dtype": "gathered",
    "_allgather_params_coalesced": "gathered",
    "wait": "gathered",
    "_allgather_param": "gathered",
    "_partition_param": "weights",
}


def category_of(storage: Storage, request: TraceRequest) -> str:
    """What the storage is, from who made it, when, and its shape."""
    if storage.category:
        return storage.category
    if storage.dtype == "workspace":
        return "workspace"
    if storage.origin:
        return _DEEPSPEED_CATEGORIES.get(storage.origin, "deepspeed")
    if storage.phase == "optimizer_step":
        return "optimizer"
    if len(storage.shape) >= 2 and storage.shape[-1] == request.vocab_size:
        return "logits"
    if storage.phase == "backward" and storage.died is None:
        return "gradients"
    return "activations"
