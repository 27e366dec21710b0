"""Builds the model as LLaMA-Factory does, from its config, on fake tensors: no weights are read or made."""

from __future__ import annotations

import importlib
import inspect
import logging
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from dpofit.trace import kernels, long_context, older, quantized, stubs, unsloth
from dpofit.trace.device import GPU
from dpofit.trace.imports import import_training_stack
from dpofit.trace.request import TraceRequest


def _as_on_cuda(function: Any) -> Any:
    """The same function where it asks for `device.type == "cuda"` told yes: Liger's choice of buffers depends on it."""
    source = textwrap.dedent(inspect.getsource(function)).replace('.device.type == "cuda"', '.device.type == "cpu"')
    scope: dict[str, Any] = {}
    exec(compile(source, inspect.getsourcefile(function) or "liger", "exec"), function.__globals__, scope)
    return scope[function.__name__]


@contextmanager
def cuda_semantics(request: TraceRequest) -> Iterator[list[str]]:
    """Inside, LLaMA-Factory's code runs as it would on a CUDA machine; yields the list of substitutions made."""
    import_training_stack()
    import transformers.integrations.flash_attention
    import transformers.masking_utils
    import transformers.modeling_flash_attention_utils as flash

    done: list[str] = []
    with ExitStack() as stack:
        patch = lambda target, name, value: stack.enter_context(mock.patch.object(target, name, value))  # noqa: E731
        patch(transformers.masking_utils, "is_tracing", lambda *_: False)
        patch(flash, "is_tracing", lambda *_: False)
        patch(torch.nn.functional, "scaled_dot_product_attention", kernels.sdpa)
        on_cpu = torch.is_autocast_enabled  # without a device PEFT's bnb layers ask about CUDA
        patch(torch, "is_autocast_enabled", lambda device="cpu": on_cpu(device))
        done.append("sdpa: torch's CUDA kernels by mask (flash, memory-efficient), as their meta functions")
        if request.attention == "fa2":
            functions = (
                kernels.flash_attn_func,
                kernels.flash_attn_varlen_func,
                None,
                flash._pad_input,
                flash._unpad_input,
            )
            patch(flash, "_lazy_imports", lambda *args, **kwargs: functions)
            patch(flash, "_loaded_implementation", None)
            # where packed samples end stands in the position ids' values, which fake tensors lack: one sample
            ends = lambda ids: torch.zeros(2, dtype=torch.int32, device=ids.device)  # noqa: E731
            patch(flash, "prepare_fa_kwargs_from_position_ids", lambda ids: ((ends(ids),) * 2, (request.tokens,) * 2))
            done.append("flash-attn 2: torch's flash kernel, which is the same code")
        if request.transformers < (5, 0):
            done += older.patches(request.transformers, stack)
        if request.unsloth:
            done.append(unsloth.SUBSTITUTION)
        properties = SimpleNamespace(multi_processor_count=request.multiprocessors, major=9, minor=0)
        patch(torch.cuda, "get_device_properties", lambda *_: properties)
        patch(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        if request.quantization_bit or request.ref_quantization_bit:
            done.append("bitsandbytes: its layers' stored tensors and the temporaries of its kernels")
        if request.liger:
            stack.enter_context(stubs.importable_triton())  # Liger imports its kernels when they are first called
            _patch_liger(patch)
            done.append("Liger: its own host code, Triton kernels launch nothing")
        yield done


def _patch_liger(patch: Any) -> None:
    import liger_kernel.ops.fused_linear_cross_entropy as flce
    import liger_kernel.ops.rms_norm as rms_norm
    import liger_kernel.transformers.monkey_patch  # noqa: F401  imports all that it patches with
    import transformers.loss.loss_utils

    dispatch = importlib.import_module("liger_kernel.backends.dispatch")
    # Now, not amid a trace: an import that fails is logged with its callers' frames, and so keeps their tensors alive.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    for operation in ("rope", "cross_entropy", "fused_linear_cross_entropy"):
        dispatch.list_registered(operation)
    patch(dispatch, "available_impls", lambda *_, **__: ["nvidia-triton"])
    patch(rms_norm, "rms_norm_backward", _as_on_cuda(rms_norm.rms_norm_backward))
    patch(flce, "fused_linear_cross_entropy_forward", _as_on_cuda(flce.fused_linear_cross_entropy_forward))
    # Liger replaces these globally; patching each with itself puts the originals back on exit.
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3", "Glm4"):
        module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
        for part in ("RMSNorm", "MLP"):
            patch(module, name + part, getattr(module, name + part))
        patch(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
        causal = getattr(module, name + "ForCausalLM")
        patch(causal, "forward", causal.forward)
    patch(transformers.loss.loss_utils.nn.functional, "cross_entropy", torch.nn.functional.cross_entropy)


def arguments(request: TraceRequest) -> tuple[Any, Any]:
    """(ModelArguments, FinetuningArguments) as LLaMA-Factory's parser would make them."""
    from llamafactory.hparams import FinetuningArguments, ModelArguments

    model_args = ModelArguments(
        model_name_or_path="traced",
        flash_attn={"sdpa": "sdpa", "fa2": "fa2", "eager": "disabled"}[request.attention],
        enable_liger_kernel=request.liger,
        disable_gradient_checkpointing=request.checkpointing == "none",
        use_reentrant_gc=request.checkpointing != "nonreentrant",
        use_unsloth_gc=request.checkpointing == "unsloth",
        upcast_layernorm=request.upcast_layernorm,
        upcast_lmhead_output=request.upcast_lmhead_output,
    )
    model_args.compute_dtype = torch.bfloat16
    finetuning_args = FinetuningArguments(
        stage=request.stage,
        finetuning_type=request.finetuning,
        pref_loss=request.pref_loss,
        ref_model="given" if request.ref_model else None,
        pref_ftx=request.pref_ftx,
        ld_alpha=request.ld_alpha,
        freeze_trainable_layers=request.freeze_layers,
        freeze_trainable_modules=",".join(request.freeze_modules),
        freeze_extra_modules=",".join(request.freeze_extra) or None,
        lora_rank=request.lora_rank,
        lora_target=",".join(request.lora_target),
        use_dora=request.use_dora,
        additional_target=",".join(request.additional_target) or None,
        pure_bf16=request.precision == "pure_bf16",
        **dict(request.own_optimizer),
    )
    return model_args, finetuning_args


def build_model(request: TraceRequest, fake: FakeTensorMode | None, trainable: bool = True) -> torch.nn.Module:
    """The policy (or, not trainable, the reference) with LLaMA-Factory's patches; parameters live in `fake`, or are
    real and random."""
    import_training_stack()
    from llamafactory.model.adapter import init_adapter
    from llamafactory.model.model_utils.attention import configure_attn_implementation
    from llamafactory.model.model_utils.kv_cache import configure_kv_cache
    from llamafactory.model.model_utils.liger_kernel import apply_liger_kernel
    from llamafactory.model.patcher import patch_model, patch_valuehead_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import AutoModelForCausalLMWithValueHead

    model_args, finetuning_args = arguments(request)
    values = request.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with mock.patch("transformers.utils.is_flash_attn_2_available", lambda: True):
        configure_attn_implementation(config, model_args)
    implementation = config._attn_implementation
    configure_kv_cache(config, model_args, trainable)
    require_logits = request.stage not in ("pt", "sft") or "answer_logps" in request.long_context
    apply_liger_kernel(config, model_args, trainable, require_logits)
    config._attn_implementation = "sdpa"  # transformers checks that the flash-attn package is there; set after
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config._attn_implementation = implementation
    if request.transformers < (4, 46):
        older.fp32_logits(model)
    packed = request.quantization_bit if trainable else request.ref_quantization_bit
    if packed:
        with torch.device("meta"):
            quantized.quantize(model, packed, request.double_quantization)
    patch_model(model, None, model_args, trainable, request.stage == "rm")
    with torch.device("meta"), quantized.importable() if packed else nullcontext():
        if request.precision == "deepspeed":
            with mock.patch("llamafactory.model.adapter.is_deepspeed_zero3_enabled", lambda: True):
                model = init_adapter(config, model, model_args, finetuning_args, trainable)
        else:
            model = init_adapter(config, model, model_args, finetuning_args, trainable)
    if request.stage == "rm":
        with torch.device("meta"):
            model = AutoModelForCausalLMWithValueHead.from_pretrained(model)
        patch_valuehead_model(model)
    long_context.tile(model, request)
    if request.unsloth and trainable:
        unsloth.install(model)
    if request.precision == "deepspeed":
        model.to(torch.bfloat16)  # deepspeed 0.18.4 engine.py _configure_distributed_model: module.bfloat16()
    model.train(trainable)
    if not trainable:
        model.requires_grad_(False)
    _materialize(model, fake)
    return model


def _like(tensor: torch.Tensor, fake: FakeTensorMode | None) -> torch.Tensor:
    if fake is None:
        return torch.full(tensor.shape, 0.01, dtype=tensor.dtype, device=GPU)
    with no_dispatch():
        return FakeTensor(fake, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), GPU)


def _materialize(model: torch.nn.Module, fake: FakeTensorMode | None) -> None:
    """Replace every meta parameter and buffer by one on the stand-in GPU, keeping ties."""
    made: dict[int, torch.Tensor] = {}
    with fake or nullcontext():
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is None:
                    continue
                if id(param) not in made:
                    data = _like(param, fake)
                    made[id(param)] = torch.nn.Parameter(data, requires_grad=param.requires_grad)
                module._parameters[name] = made[id(param)]  # type: ignore[assignment]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = _like(buffer, fake)
    # `made` keys are ids of the meta parameters, alive in `model` until replaced one by one above.
