"""Runs training steps of LLaMA-Factory's own trainer on fake tensors and records them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from dpofit.trace import kernels, long_context, zero
from dpofit.trace.build import arguments, build_model, cuda_semantics
from dpofit.trace.device import GPU
from dpofit.trace.imports import import_training_stack
from dpofit.trace.memo import Memo
from dpofit.trace.optimizers import make_optimizer
from dpofit.trace.reference_pass import run_reference_pass
from dpofit.trace.request import Precision, TraceRequest
from dpofit.trace.storages import Recorder, StorageMode
from dpofit.trace.trainers import batch_of, loss_of, make_stage_trainer, rows_of_one, uses_reference

_DEEPSPEED = "transformers.integrations.deepspeed"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What the steps did: every storage and, in order, every birth and death."""

    request: TraceRequest
    recorder: Recorder
    substitutions: tuple[str, ...]


def trace_step(
    request: TraceRequest,
    observe: Callable[[Any], None] = lambda trainer: None,
    stepped: Callable[[], None] = lambda: None,
) -> TracedStep:
    """Trace `request.steps` steps: forward, reference, loss, backward of every micro-batch, and the optimizer's step.

    `observe` is called with the prepared trainer before the first step, `stepped` after each.
    """
    recorder = Recorder()
    group: Any = zero.process_group(request.rank, request.world_size, recorder) if request.deepspeed else nullcontext()
    stage = request.deepspeed.get("zero_optimization", {}).get("stage", 0)
    linear: Any = zero.memory_efficient_linear() if stage == 3 else nullcontext()
    semantics: Any = cuda_semantics(request) if request.cuda else nullcontext([])
    pieces = long_context.pieces(request, recorder.repin)
    import_training_stack(request)
    # The group first: DeepSpeed asks torch's compiler for Triton when it is imported, before one stands in for it.
    with group, semantics as done, pieces as more, linear, _cuda_is_the_stand_in(), _no_collector():
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        fake.cache_enabled = False  # Memo remembers
        mode = StorageMode(
            recorder,
            kernels.CUDA_WORKSPACE if request.cuda else kernels.CPU_WORKSPACE,
            lambda tensor: _scalar(tensor, request),
            kernels.accumulate_in_place,
            Memo(fake),
        )
        model, reference = build_models(request, fake)
        _record_weights(recorder, model, "weights")
        if reference is not None:
            _record_weights(recorder, reference, "reference_weights")
        with fake, mode, recorder.in_phase("init"):
            trainer, optimizer = make_trainer(request, model, reference)
        recorder.module_path = _follow_modules(model)
        observe(trainer)
        with fake, mode, _phases(trainer, recorder):
            if trainer._dpofit_reference is not None:
                run_reference_pass(request, trainer, recorder, lambda: _given_reference(request, fake, recorder))
            for step in range(1, request.steps + 1):
                recorder.step = step
                run_step(request, trainer, optimizer, recorder)
                stepped()
            recorder.closed = True
    return TracedStep(request, recorder, (*done, *more))


def build_models(request: TraceRequest, fake: FakeTensorMode | None) -> tuple[Any, Any]:
    """(policy, reference or None), on fake tensors or, with None, on real ones."""
    return build_model(request, fake), _reference(request, fake)


@contextmanager
def _no_collector() -> Iterator[None]:
    """What dies in a reference cycle dies when the collector happens to run; here it stays, the same every time."""
    enabled = gc.isenabled()
    gc.disable()
    with mock.patch.object(gc, "collect", lambda *_: 0):  # deepspeed collects at each line it logs
        yield
    if enabled:
        gc.enable()


def _scalar(tensor: torch.Tensor, request: TraceRequest) -> Any:
    """What `.item()` answers: a padding mask's `.all()` is whether nothing is padded, a length the longest."""
    if tensor.dtype == torch.bool:
        return tensor.device == GPU and not request.padding
    return 1.0 if tensor.dtype.is_floating_point else request.tokens


def _reference(request: TraceRequest, fake: FakeTensorMode | None) -> torch.nn.Module | None:
    """LLaMA-Factory's create_ref_model: a second whole model unless LoRA (the adapter is switched off)."""
    adapters_only = request.finetuning == "lora" and not request.ref_model
    if not uses_reference(request) or adapters_only or "cached_reference" in request.long_context:
        return None
    return _build_reference(request, fake)


def _build_reference(request: TraceRequest, fake: FakeTensorMode | None) -> torch.nn.Module:
    precision: Precision = "deepspeed" if request.precision == "deepspeed" else "pure_bf16"
    return build_model(replace(request, finetuning="full", precision=precision), fake, trainable=False)


def _given_reference(request: TraceRequest, fake: FakeTensorMode, recorder: Recorder) -> torch.nn.Module:
    """The reference that cached_reference loads amid the trace."""
    # transformers would make it partitioned, which fake tensors can't be: the engine partitions it after
    with _disable_current_modes(), mock.patch(f"{_DEEPSPEED}._hf_deepspeed_config_weak_ref", None):
        model = zero.already_placed(_build_reference(request, fake))
        followed = recorder.module_path
        _record_weights(recorder, model, "reference_weights")
        recorder.module_path = followed
    return model


def _record_weights(recorder: Recorder, model: torch.nn.Module, category: str) -> None:
    recorder.category = category
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        recorder.module_path = lambda name=name: name  # type: ignore[misc]
        recorder.see(tensor, "parameter")
    recorder.category = ""
    recorder.module_path = lambda: ""


def _follow_modules(model: torch.nn.Module) -> Callable[[], str]:
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

    if request.deepspeed:
        return zero.accelerator(_filled(request))
    AcceleratorState._reset_state(True)
    made = Accelerator(mixed_precision="bf16" if request.precision == "autocast" else "no", cpu=True)
    made.state.device = GPU
    return made


def _filled(request: TraceRequest) -> dict[str, Any]:
    """The DeepSpeed JSON with the `auto` that transformers' Trainer fills (integrations/deepspeed.py
    trainer_config_process); those of the hidden size are accelerate's."""
    micro_batch = request.rows // rows_of_one(request)
    values: dict[str, Any] = {
        **request.deepspeed,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": request.micro_batches,
        "train_batch_size": micro_batch * request.micro_batches * request.world_size,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    values["zero_optimization"] = dict(values["zero_optimization"])
    return values


def make_trainer(request: TraceRequest, model: torch.nn.Module, reference: torch.nn.Module | None) -> tuple[Any, Any]:
    """(trainer, optimizer)."""
    from trl.models.utils import prepare_deepspeed

    _, finetuning_args = arguments(request)
    accelerator = _accelerator(request)
    optimizer = make_optimizer(request, model, finetuning_args) if request.optimizer else None
    if request.deepspeed:
        zero.already_placed(model)
        if reference is not None:
            reference = prepare_deepspeed(zero.already_placed(reference), accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
    elif request.precision == "autocast":
        model = accelerator.prepare_model(model, device_placement=False)
        if reference is not None:
            reference = accelerator.prepare_model(reference, device_placement=False, evaluation_mode=True)
    trainer = make_stage_trainer(request, model, reference, finetuning_args)
    trainer._dpofit_reference = long_context.cache_for(request, finetuning_args)
    trainer.accelerator = accelerator
    accelerator.state.device = GPU  # preparing the model has set it back
    return trainer, optimizer


def run_step(request: TraceRequest, trainer: Any, optimizer: Any, recorder: Recorder) -> None:
    """One step of `request.micro_batches` micro-batches, as Trainer.training_step and its loop run it."""
    model, accelerator = trainer.model, trainer.accelerator
    for index in range(request.micro_batches):
        last = index == request.micro_batches - 1
        accelerator.sync_gradients = last
        recorder.phase = "forward"
        recorder.category = "batch"
        batch = batch_of(request)
        recorder.category = ""
        loss = loss_of(request, trainer, model, batch)
        recorder.phase = "backward"
        if request.deepspeed and not request.optimizer:
            model.backward(loss)
        elif request.deepspeed:
            accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=last, scale_wrt_gas=False)
        else:
            loss.backward()
        del loss, batch
    if optimizer is not None and not request.deepspeed:
        recorder.phase = "optimizer_step"
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    if optimizer is not None:  # Trainer's loop; the engine's own step leaves stage 0's gradients
        model.zero_grad()


@contextmanager
def _phases(trainer: Any, recorder: Recorder) -> Iterator[None]:
    """Phase marks at the trainer's and the engine's own boundaries."""

    def marking(owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.phase = phase
            return original(*args, **kwargs)

        stack.enter_context(mock.patch.object(owner, name, MethodType(marked, owner)))

    with ExitStack() as stack:
        if trainer._dpofit_reference is None:  # else a step only looks up what the pass has found
            marking(trainer, "compute_reference_log_probs", "reference_forward")
        marking(trainer, "compute_preference_loss", "loss")
        marking(trainer, "kto_loss", "loss")
        if hasattr(trainer.model, "optimizer"):
            marking(trainer.model, "step", "optimizer_step")
        yield


@contextmanager
def _cuda_is_the_stand_in() -> Iterator[None]:
    """LLaMA-Factory's unsloth gc says `.to("cuda")` and marks its autograd function for CUDA's autocast."""
    to = torch.Tensor.to

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and args[0] == "cuda":
            args = (GPU, *args[1:])
        alone = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(alone, torch.dtype | torch.device | str) and alone in (self.dtype, self.device, str(self.device)):
            return self  # as torch does, after three questions to the tracer
        if args and args[0] == GPU and not self.numel():  # KTO's `torch.Tensor([])` is no fake tensor
            return torch.empty(self.shape, dtype=self.dtype, device=GPU)
        return to(self, *args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "to", moved),
        mock.patch.object(torch.cuda.amp, "custom_fwd", lambda f: torch.amp.custom_fwd(f, device_type="cpu")),
        mock.patch.object(torch.cuda.amp, "custom_bwd", lambda f: torch.amp.custom_bwd(f, device_type="cpu")),
    ):
        yield
