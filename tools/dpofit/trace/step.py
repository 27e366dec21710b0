"""Runs one training step of LLaMA-Factory's own trainer on fake tensors and records it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpofit.trace import kernels
from dpofit.trace.build import arguments, build_model, cuda_semantics
from dpofit.trace.device import GPU
from dpofit.trace.request import TraceRequest
from dpofit.trace.storages import Recorder, StorageMode


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What one step did: every storage and, in order, every birth and death."""

    request: TraceRequest
    recorder: Recorder
    substitutions: tuple[str, ...]


def trace_step(request: TraceRequest) -> TracedStep:
    """Trace one step: forward, reference, loss, backward, of `request.micro_batches` micro-batches."""
    with cuda_semantics(request) as substitutions:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        recorder = Recorder()
        model = build_model(request, fake)
        reference = _reference(request, fake)
        _record_weights(recorder, model, "weights")
        if reference is not None:
            _record_weights(recorder, reference, "reference_weights")
        path = _follow_modules(model)
        recorder.module_path = path
        mode = StorageMode(
            recorder, kernels.WORKSPACE, lambda tensor: _scalar(tensor, request), kernels.accumulate_in_place
        )
        trainer = _trainer(request, model, reference)
        with _cuda_is_the_stand_in(), fake, mode:
            for _ in range(request.micro_batches):
                _micro_batch(request, trainer, recorder)
    return TracedStep(request, recorder, tuple(substitutions))


def _scalar(tensor: torch.Tensor, request: TraceRequest) -> Any:
    """What `.item()` answers: a padding mask's `.all()` is whether nothing is padded, a length the longest."""
    if tensor.dtype == torch.bool:
        return not request.padding
    return request.tokens if not tensor.dtype.is_floating_point else 1.0


def _uses_reference(request: TraceRequest) -> bool:
    return request.stage == "dpo" and request.pref_loss not in ("orpo", "simpo")


def _reference(request: TraceRequest, fake: FakeTensorMode) -> torch.nn.Module | None:
    """LLaMA-Factory's create_ref_model: a second whole model unless LoRA (the adapter is switched off)."""
    if not _uses_reference(request) or request.finetuning == "lora":
        return None
    from dataclasses import replace

    plain = replace(
        request, finetuning="full", precision="pure_bf16" if request.precision != "deepspeed" else "deepspeed"
    )
    return build_model(plain, fake, trainable=False)


def _record_weights(recorder: Recorder, model: torch.nn.Module, category: str) -> None:
    recorder.category = category
    for name, param in model.named_parameters():
        recorder.module_path = lambda name=name: name
        recorder.see(param, "parameter")
    for name, buffer in model.named_buffers():
        recorder.module_path = lambda name=name: name
        recorder.see(buffer, "buffer")
    recorder.category = ""


def _follow_modules(model: torch.nn.Module) -> Any:
    stack: list[str] = []

    def leave(*_: Any) -> None:
        stack.pop()  # a hook that returns something would replace the module's output

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: stack.append(name))
        module.register_forward_hook(leave, always_call=True)
    return lambda: stack[-1] if stack else ""


def _accelerator(request: TraceRequest) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    return Accelerator(mixed_precision="bf16" if request.precision == "autocast" else "no", cpu=True)


def _trainer(request: TraceRequest, model: torch.nn.Module, reference: torch.nn.Module | None) -> Any:
    """The trainer with what its loss path reads; its `__init__` would want datasets and an output folder."""
    from llamafactory.train.dpo.trainer import CustomDPOTrainer
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
    from trl.trainer import disable_dropout_in_model

    _, finetuning_args = arguments(request)
    accelerator = _accelerator(request)
    if request.precision == "autocast":
        accelerator._models = []
        model = accelerator.prepare_model(model, device_placement=False)
        if reference is not None:
            reference = accelerator.prepare_model(reference, device_placement=False, evaluation_mode=True)
    if request.stage == "sft":
        trainer = CustomSeq2SeqTrainer.__new__(CustomSeq2SeqTrainer)
        trainer.compute_loss_func = None
        trainer.label_smoother = None
        trainer.model_accepts_loss_kwargs = True
        trainer.ref_model = None
    else:
        disable_dropout_in_model(model)
        trainer = CustomDPOTrainer.__new__(CustomDPOTrainer)
        trainer.ref_model = reference
        trainer.f_divergence_type = "reverse_kl"
        trainer.reference_free = False
        trainer.label_pad_token_id = -100
        trainer._stored_metrics = defaultdict(lambda: defaultdict(list))
        trainer.beta = finetuning_args.pref_beta
        trainer.loss_type = finetuning_args.pref_loss
        trainer.ftx_gamma = finetuning_args.pref_ftx
        trainer.bco_gemma = finetuning_args.pref_bco_weight
        trainer.label_smoothing = finetuning_args.dpo_label_smoothing
        trainer.simpo_gamma = finetuning_args.simpo_gamma
        trainer.ld_alpha = finetuning_args.ld_alpha
    finetuning_args.use_ref_model = _uses_reference(request)
    trainer.finetuning_args = finetuning_args
    trainer.accelerator = accelerator
    trainer.model = model
    trainer.args = SimpleNamespace(device=GPU, average_tokens_across_devices=False, n_gpu=1)
    return trainer


def _batch(request: TraceRequest) -> dict[str, torch.Tensor]:
    shape = (request.rows, request.tokens)
    return {
        "input_ids": torch.ones(shape, dtype=torch.int64, device=GPU),
        "attention_mask": torch.ones(shape, dtype=torch.int64, device=GPU),
        "labels": torch.ones(shape, dtype=torch.int64, device=GPU),
    }


def _micro_batch(request: TraceRequest, trainer: Any, recorder: Recorder) -> None:
    model = trainer.model
    with recorder.in_phase("forward"):
        recorder.category = "batch"
        batch = _batch(request)
        recorder.category = ""
        if request.stage == "sft":
            loss = trainer.compute_loss(
                model, batch, num_items_in_batch=torch.tensor(request.rows * request.tokens, device=GPU)
            )
        else:
            with _phases_of_dpo(trainer, recorder):
                loss, _ = trainer.get_batch_loss_metrics(model, batch)
    with recorder.in_phase("backward"):
        loss.backward()
    del loss


@contextmanager
def _phases_of_dpo(trainer: Any, recorder: Recorder) -> Iterator[None]:
    """Phase marks at the trainer's own boundaries."""
    compute_reference = trainer.compute_reference_log_probs
    compute_loss = trainer.compute_preference_loss

    def reference(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.phase = "reference_forward"
        return compute_reference(*args, **kwargs)

    def loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.phase = "loss"
        return compute_loss(*args, **kwargs)

    trainer.compute_reference_log_probs = MethodType(reference, trainer)
    trainer.compute_preference_loss = MethodType(loss, trainer)
    yield
    del trainer.compute_reference_log_probs, trainer.compute_preference_loss


@contextmanager
def _cuda_is_the_stand_in() -> Iterator[None]:
    """LLaMA-Factory's unsloth gc says `.to("cuda")` and marks its autograd function for CUDA's autocast."""
    to = torch.Tensor.to

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and args[0] == "cuda":
            args = (GPU, *args[1:])
        return to(self, *args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "to", moved),
        mock.patch.object(torch.cuda.amp, "custom_fwd", lambda f: torch.amp.custom_fwd(f, device_type="cpu")),
        mock.patch.object(torch.cuda.amp, "custom_bwd", lambda f: torch.amp.custom_bwd(f, device_type="cpu")),
    ):
        yield
