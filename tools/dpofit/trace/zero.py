"""Runs the real DeepSpeed engine on fake tensors: one rank of a process group of any size that sends nothing."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dpofit.trace.device import GPU, HOST, deepspeed_accelerator
from dpofit.trace.imports import import_deepspeed
from dpofit.trace.storages import Recorder

# What DeepSpeed and accelerate read, beside rank and world size.
_ENVIRONMENT = {
    "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu",
    "ACCELERATE_USE_DEEPSPEED": "true",
}  # fmt: skip
_COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter_tensor")


class _CpuAdam:
    """DeepSpeed's CPU Adam extension: reads and writes host tensors in place, allocates nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def load(self) -> _CpuAdam:
        return self


def _wait(handle: Any, handle_dependency: bool = True) -> None:
    """AllGatherCoalescedHandle.wait (partition_parameters.py:729) allocates a parameter by putting together a view of
    every rank's part of the flat buffer; here the parameter alone is made, not a view a rank."""
    if handle.complete:
        return
    for param in handle.params:
        param.data = torch.empty(param.ds_shape, dtype=param.ds_tensor.dtype, device=GPU)
        param.ds_status = type(param.ds_status).AVAILABLE
    handle.complete = True


def _allgather_params(init: Any, param_list: list[Any], hierarchy: int = 0) -> None:
    """Init._allgather_params (partition_parameters.py:1989): a flat buffer, then each parameter, likewise."""
    elements = sum(param.ds_tensor.ds_numel for param in param_list) * init.num_partitions
    flat = torch.empty(elements, dtype=param_list[0].ds_tensor.dtype, device=init.local_device)
    for param in param_list:
        param.data = torch.empty(param.ds_shape, dtype=param.ds_tensor.dtype, device=init.local_device)
    del flat


def _reduce_scatter_coalesced(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """coalesced_collectives.py:158: one tensor that divides evenly is its own flat buffer; others are put together in
    one, with paddings; likewise."""
    ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    parts = [-(-tensor.numel() // ranks) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % ranks == 0:
        flat = tensors[0].view(-1)
    else:
        dtype, device = tensors[0].dtype, tensors[0].device
        short = (part - _own(tensor, part, rank)
                 for rank in range(ranks) for tensor, part in zip(tensors, parts, strict=True))  # fmt: skip
        paddings = [torch.empty(elements, dtype=dtype, device=device) for elements in short if elements]
        flat = torch.empty(sum(parts) * ranks, dtype=dtype, device=device)
        del paddings
    flat.div_(ranks)
    starts = accumulate(parts[:-1], initial=mine * sum(parts))
    return [flat.narrow(0, start, _own(tensor, part, mine))
            for tensor, part, start in zip(tensors, parts, starts, strict=True)]  # fmt: skip


def _accumulator(find: Any) -> Any:
    """torch's `_get_grad_fn_or_grad_acc`, which makes a view of a parameter to find its node, and asks nobody about it:
    the engine does so for each parameter at each checkpoint's backward (runtime/utils.py:1458)."""

    def found(tensor: torch.Tensor) -> Any:
        with torch._C._DisableTorchDispatch():
            return find(tensor)

    return found


def _own(tensor: torch.Tensor, part: int, rank: int) -> int:
    """Elements of `tensor` in the part of `rank`, the last of which may be short or empty."""
    return max(0, min(part, tensor.numel() - rank * part))


@contextmanager
def process_group(rank: int, world_size: int, recorder: Recorder) -> Iterator[None]:
    """Inside, this process is rank `rank` of `world_size`; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "the tracer needs a process without a process group"
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, _ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": str(world_size)})
        )
        import_deepspeed()
        from deepspeed.accelerator import real_accelerator

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            copy = torch.empty_like(tensor, device=HOST)
            recorder.repin(copy)
            return copy

        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # deepspeed's own deprecations, once an operation
        before = real_accelerator.get_accelerator()
        real_accelerator.set_accelerator(deepspeed_accelerator(pin))
        stack.callback(real_accelerator.set_accelerator, before)
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # importing it sets another
        import deepspeed.ops.adam.cpu_adam
        import deepspeed.utils.groups
        import deepspeed.utils.nvtx
        from deepspeed.comm.torch import Noop, TorchBackend
        from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3

        stack.enter_context(mock.patch.object(deepspeed.utils.nvtx, "enable_nvtx", False))  # ranges for a profiler
        find = torch.autograd.graph._get_grad_fn_or_grad_acc
        stack.enter_context(mock.patch.object(torch.autograd.graph, find.__name__, _accumulator(find)))

        # Compares this rank with the others; alone, it agrees with itself.
        patch = mock.patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda *_: None)
        stack.enter_context(patch)
        stack.enter_context(mock.patch.object(deepspeed.ops.adam.cpu_adam, "CPUAdamBuilder", _CpuAdam))
        stack.enter_context(mock.patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": False}))
        stack.enter_context(_forgetting(deepspeed.utils.groups))
        stack.enter_context(_without_overflow())
        stack.enter_context(mock.patch.object(partition_parameters.AllGatherCoalescedHandle, "wait", _wait))
        stack.enter_context(mock.patch.object(partition_parameters.Init, "_allgather_params", _allgather_params))
        stack.enter_context(mock.patch.object(stage3, "reduce_scatter_coalesced", _reduce_scatter_coalesced))
        for collective in _COLLECTIVES:
            stack.enter_context(mock.patch.object(TorchBackend, collective, lambda *_, **__: Noop()))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(_leave)
        yield


@contextmanager
def _without_overflow() -> Iterator[None]:
    """Stage 0 looks for overflow in values that fake tensors lack; it looks, and finds none."""
    from deepspeed.runtime.utils import CheckOverflow

    check = CheckOverflow.check

    def looked(self: Any, *args: Any, **kwargs: Any) -> bool:
        check(self, *args, **kwargs)
        return False

    with mock.patch.object(CheckOverflow, "check", looked):
        yield


@contextmanager
def memory_efficient_linear() -> Iterator[None]:
    """What zero.Init leaves behind in a real ZeRO-3 run: F.linear is DeepSpeed's, which saves the parameter itself for
    backward, not the gathered buffer (partition_parameters.py:574-580). Here the model is made without zero.Init."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    with mock.patch.object(torch.nn.functional, "linear", zero3_linear_wrap):
        yield


@contextmanager
def _forgetting(module: Any) -> Iterator[None]:
    """deepspeed.utils.groups keeps what it made in module variables, which would outlive this process group."""
    before = {name: value for name, value in vars(module).items() if not callable(value)}
    try:
        yield
    finally:
        vars(module).update({name: before[name] for name in before if not name.startswith("__")})


def _leave() -> None:
    import deepspeed.comm.comm as comm
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(True)
    unset_hf_deepspeed_config()  # or transformers would build the next model partitioned
    dist.destroy_process_group()
    comm.cdb = None  # deepspeed keeps the group it found


def accelerator(config: dict[str, Any]) -> Any:
    """accelerate's own Accelerator over a DeepSpeed config; it fills `auto` from the model's hidden size."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    made = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    made.state.device = GPU
    return made


def already_placed(model: torch.nn.Module) -> torch.nn.Module:
    """The engine moves and casts the module it gets; ours is made right, and fake parameters can't be swapped."""
    model.to = lambda *args, **kwargs: model  # type: ignore[method-assign]
    model.bfloat16 = lambda: model  # type: ignore[method-assign]
    return model
