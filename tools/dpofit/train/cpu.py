"""What must differ for LLaMA-Factory and DeepSpeed to train on CPU ranks; only smoke runs use it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from dpofit.train import hooks

OWNER = "cpu"
# DeepSpeed waits for the last of several all-gathers only (0.18.4 partition_parameters.py:1968): in order on a CUDA
# stream, a race between gloo's threads, which now and then gave garbage weights and NaN.
COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "reduce_scatter_tensor", "broadcast", "reduce")


def prepare(uses_deepspeed: bool) -> None:
    """Make this process a gloo rank on the CPU. The launcher has set DS_ACCELERATOR=cpu before Python started.

    `use_cpu` stays unset: accelerate skips DeepSpeed with it.
    """
    import torch

    torch.set_num_threads(1)
    if "RANK" in os.environ:
        # DeepSpeed asks for oneCCL on CPUs unless a group is there already.
        torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    if uses_deepspeed:
        import deepspeed.ops

        # A shared-memory all-reduce that would be compiled for nothing: gloo does the work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    in_order = [hooks.Hook(OWNER, f"deepspeed.comm.torch:TorchBackend.{name}", at_once) for name in COLLECTIVES]
    hooks.install(
        [
            *(in_order if uses_deepspeed else ()),
            # transformers refuses bf16 without a GPU; CPUs compute it. Both names: the second was imported already.
            hooks.Hook(OWNER, "transformers.utils:is_torch_bf16_gpu_available", _always),
            hooks.Hook(OWNER, "transformers.training_args:is_torch_bf16_gpu_available", _always),
            hooks.Hook(OWNER, "accelerate.state:PartialState.set_device", _without_index),
            hooks.Hook(
                OWNER,
                "llamafactory.model.model_utils.checkpointing:get_unsloth_gradient_checkpointing_func",
                _unsloth_on_cpu,
            ),
        ]
    )


def at_once(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The collective has finished when it returns; its handle can still be waited for."""

    @functools.wraps(stock)
    def waited(*args: Any, **kwargs: Any) -> Any:
        handle = stock(*args, **kwargs)
        if hasattr(handle, "wait"):
            handle.wait()
        return handle

    return waited


def _always(stock: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *args, **kwargs: True


def _without_index(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Plain `cpu`: accelerate 1.11 makes it `cpu:<rank>` under DDP, where torch.load can't put an optimizer's state."""
    import torch

    def set_device(state: Any) -> None:
        stock(state)
        if state.device.type == "cpu":
            state.device = torch.device("cpu")

    return set_device


def _unsloth_on_cpu(stock: Callable[..., Any]) -> Callable[..., Any]:
    """LLaMA-Factory's own function with `.to("cuda")` replaced by the gradient's device (checkpointing.py 43-77)."""
    import torch

    class UnslothGradientCheckpointing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, forward_function: Any, hidden_states: Any, *args: Any) -> Any:
            saved_hidden_states = hidden_states.to("cpu", copy=True)
            with torch.no_grad():
                outputs = forward_function(hidden_states, *args)
            ctx.save_for_backward(saved_hidden_states)
            ctx.forward_function = forward_function
            ctx.args = args
            return outputs

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            (hidden_states,) = ctx.saved_tensors
            hidden_states = hidden_states.to(grad_outputs[0].device).detach().requires_grad_(True)
            with torch.enable_grad():
                outputs = ctx.forward_function(hidden_states, *ctx.args)
                output = outputs[0] if isinstance(outputs, tuple) else outputs
            torch.autograd.backward(output, grad_outputs[0])
            return (None, hidden_states.grad) + (None,) * len(ctx.args)

    return lambda: UnslothGradientCheckpointing.apply
