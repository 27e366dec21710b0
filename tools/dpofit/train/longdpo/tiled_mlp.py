"""Decoder MLPs over tiles of the sequence, recomputed in backward: their working set stops growing with length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dpofit.errors import BadInput, Problem
from dpofit.train.hooks import Hook
from dpofit.train.longdpo import OWNER, TILE_TOKENS
from dpofit.train.longdpo.unrounded import unrounded_linears

# Layers that add the MLP's output to the residual and do nothing else with it (transformers 5.5.4). When gradient
# checkpointing recomputes such a layer, nobody needs that output's values, so the MLP's forward is left out there:
# backward recomputes it tile by tile anyway, and the piece costs no more multiplications than checkpointing alone.
ONLY_ADDED = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


def hooks() -> list[Hook]:
    """Tile every model that LLaMA-Factory loads, policy or reference, when its adapters are in place."""
    return [Hook(OWNER, "llamafactory.model.loader:init_adapter", _tiled)]


def tile(model: torch.nn.Module) -> None:
    """Give every decoder layer's `mlp` a tiled forward. Idempotent.

    Under ZeRO-3 each MLP becomes one of DeepSpeed's leaf modules: its weights are gathered once a pass and stay until
    the last tile, instead of once a tile. To be called before the engine is made.
    BadInput where a layer's MLP is not one that works token by token.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    found: list[tuple[torch.nn.Module, Any]] = [(layer, layer.mlp) for layer in layers if hasattr(layer, "mlp")]
    mixtures = sorted({type(mlp).__name__ for _, mlp in found if hasattr(mlp, "experts") or hasattr(mlp, "router")})
    if not found or mixtures:
        wrong = f"tiled_mlp can't split {', '.join(mixtures)}" if mixtures else "its layers have no `mlp` to tile"
        raise BadInput(Problem("model", type(model).__name__, wrong, "Switch tiled_mlp off for this model."))
    for layer, mlp in found:
        if isinstance(mlp.forward, TiledForward):
            continue
        mlp.forward = TiledForward(mlp, type(layer).__name__ in ONLY_ADDED)
        if is_deepspeed_zero3_enabled():
            from deepspeed.utils import set_z3_leaf_module

            set_z3_leaf_module(mlp, True)


class TiledForward:
    """Stands in for one MLP's `forward`; whatever is inside (LoRA, Liger's SwiGLU, quantized weights) runs per tile."""

    def __init__(self, mlp: torch.nn.Module, only_added: bool) -> None:
        self._mlp = mlp
        self._stock = mlp.forward
        self._only_added = only_added
        self._output_dtype: torch.dtype | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The stock result; `hidden` is [batch, tokens, width]."""
        if hidden.numel() <= TILE_TOKENS * hidden.shape[-1]:
            return self._stock(hidden)
        self._refuse_dropout()
        trainable = [parameter for parameter in self._mlp.parameters() if parameter.requires_grad]
        if not torch.is_grad_enabled() or not (hidden.requires_grad or trainable):
            return self.forward(hidden)
        result: torch.Tensor = _Tiles.apply(self, hidden, *trainable)
        return result

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """All tiles one after the other, into one output."""
        output: torch.Tensor | None = None
        for part in _tiles(hidden):
            result = self._stock(part(hidden))
            if output is None:
                output = torch.empty(hidden.shape, dtype=result.dtype, device=result.device)
            part(output).copy_(result)
        assert output is not None
        self._output_dtype = output.dtype
        return output

    def needs_no_values(self) -> bool:
        """Whether this forward is gradient checkpointing's recomputation, in a layer that only adds the result."""
        inside_backward = torch._C._current_graph_task_id() != -1
        return inside_backward and self._only_added and self._output_dtype is not None

    def stand_in(self, hidden: torch.Tensor) -> torch.Tensor:
        """Right in shape and dtype, for a sum that nobody reads."""
        return torch.zeros((), dtype=self._output_dtype, device=hidden.device).expand(hidden.shape)

    def backward(
        self, hidden: torch.Tensor, grad: torch.Tensor, wants_hidden: bool, trainable: tuple[torch.nn.Parameter, ...]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients of `hidden` and of each of `trainable`, the latter summed over tiles in fp32, the linear layers'
        unrounded, and rounded once: like stock's single matrix multiplication."""
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wants_hidden else None
        sums: list[torch.Tensor | None] = [None] * len(trainable)

        def add(place: int, gradient: torch.Tensor) -> None:
            total = sums[place]
            sums[place] = gradient if total is None else total.add_(gradient)

        for part in _tiles(hidden):
            tokens = part(hidden).detach().requires_grad_(wants_hidden)
            with torch.enable_grad(), unrounded_linears(trainable, add):
                output = self._stock(tokens)
            inputs = (*((tokens,) if wants_hidden else ()), *trainable)
            # Not .backward(): hooks on the parameters (DeepSpeed's reduction, DDP's) shall see one gradient, the whole.
            grads = list(torch.autograd.grad(output, inputs, part(grad), allow_unused=True))
            del output
            if grad_hidden is not None:
                part(grad_hidden).copy_(grads.pop(0))
            one = None
            for place, one in enumerate(grads):
                grads[place] = None  # type: ignore[call-overload]
                if one is not None:
                    add(place, one.to(torch.promote_types(one.dtype, torch.float32), copy=sums[place] is None))
            del one  # else the last weight's gradient would stay beside the next tile
        for place, parameter in enumerate(trainable):
            total = sums[place]
            sums[place] = None if total is None else total.to(parameter.dtype)
        return grad_hidden, sums

    def _refuse_dropout(self) -> None:
        for module in self._mlp.modules():
            if isinstance(module, torch.nn.Dropout) and module.training and module.p > 0:
                raise BadInput(
                    Problem("recipe", "lora_dropout", "tiled_mlp can't repeat an MLP's dropout in backward",
                            "Set lora_dropout: 0, or switch the piece off.")
                )  # fmt: skip


class _Tiles(torch.autograd.Function):
    """One node for the whole MLP, its weights among the inputs, so that each weight gets one gradient."""

    @staticmethod
    def forward(ctx: Any, mlp: TiledForward, hidden: torch.Tensor, *trainable: torch.nn.Parameter) -> torch.Tensor:
        ctx.mlp, ctx.trainable = mlp, trainable  # not saved tensors: ZeRO-3 swaps their data between passes
        ctx.save_for_backward(hidden)
        device = hidden.device.type
        ctx.autocast = {
            "device_type": device, "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device), "cache_enabled": torch.is_autocast_cache_enabled(),
        }  # fmt: skip
        return mlp.stand_in(hidden) if mlp.needs_no_values() else mlp.forward(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        with torch.autocast(**ctx.autocast):
            grad_hidden, sums = ctx.mlp.backward(hidden, grads[0], ctx.needs_input_grad[1], ctx.trainable)
        return None, grad_hidden, *sums


def _tiles(hidden: torch.Tensor) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """For each tile, a function that cuts it, [1, tile, width], out of a tensor with `hidden`'s shape."""
    tokens = hidden.numel() // hidden.shape[-1]
    count = -(-tokens // TILE_TOKENS)
    for first in range(0, tokens, -(-tokens // count)):
        last = min(tokens, first + -(-tokens // count))
        yield lambda whole, first=first, last=last: whole.reshape(1, tokens, whole.shape[-1])[:, first:last]  # type: ignore[misc]


def _tiled(stock: Callable[..., Any]) -> Callable[..., Any]:
    def init_adapter(*args: Any, **kwargs: Any) -> Any:
        model = stock(*args, **kwargs)
        tile(model)
        return model

    return init_adapter
