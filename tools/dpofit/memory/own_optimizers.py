"""LLaMA-Factory's own optimizers, Muon, Adam-mini, GaLore and APOLLO: what they keep and need for each tensor.

Sources: llamafactory 0.9.5 train/trainer_utils.py:187-566, third_party/muon/muon.py; galore_torch 1.0 adamw.py,
galore_projector.py; apollo_torch 1.0.3 apollo.py, random_projector.py, svd_projector.py; adam_mini 1.1.1 adam_mini.py.
`element_bytes` is of weights and gradients, which decide the states' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpofit.memory.optimizers import Update, update_of
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.tensors import Tensor
from dpofit.models.shape import ModelShape
from dpofit.recipe.recipe import LowRank, Recipe

_TABLES = ("embedding", "head")


def owned(recipe: Recipe) -> bool:
    """Does LLaMA-Factory make the optimizer itself?"""
    return recipe.low_rank is not None or recipe.use_adam_mini or recipe.use_muon


def layerwise(recipe: Recipe) -> bool:
    """Every tensor is updated inside backward, as soon as its gradient is there."""
    return recipe.low_rank is not None and recipe.low_rank.layerwise


def own_optimizer_problems(recipe: Recipe, model: ModelShape, world_size: int) -> Iterator[tuple[str, str, str]]:
    """(key, what can't run or isn't modelled, the way out). The failures are those of the real code, run."""
    if recipe.low_rank is not None:
        kind = recipe.low_rank.kind
        if recipe.zero is not None:
            yield f"use_{kind}", f"{kind} with DeepSpeed, which LLaMA-Factory refuses", "Leave one of the two out"
        if recipe.optim != "adamw_torch":
            yield "optim", f"{recipe.optim} under use_{kind}", "Set optim: adamw_torch (APOLLO takes no other)"
        if recipe.low_rank.layerwise and recipe.gradient_accumulation > 1:
            wrong = "accumulation with updates layer by layer, which LLaMA-Factory refuses"
            yield "gradient_accumulation_steps", wrong, f"Set it to 1, or {kind}_layerwise: false"
        if recipe.low_rank.layerwise and world_size > 1 and recipe.zero is None:
            wrong = f"updates layer by layer on {world_size} GPUs, which LLaMA-Factory refuses"
            yield f"{kind}_layerwise", wrong, "Set it to false, or use one GPU"
        if kind == "apollo" and recipe.low_rank.projection != "std":
            wrong = f"{recipe.low_rank.projection}, with which apollo_torch scales by a vector of the wrong side"
            yield "apollo_proj_type", wrong, "Set std"
    if recipe.use_muon and recipe.zero is not None:  # KeyError: 'use_muon', muon.py:159
        wrong = "Muon under DeepSpeed, whose flat weights it fails on at its first step"
        yield "use_muon", wrong, "Leave deepspeed out"
    if not recipe.use_adam_mini:
        return
    if recipe.zero is not None:  # IndexError: too many indices for tensor of dimension 1, adam_mini.py:303
        wrong = "Adam-mini under DeepSpeed, whose flat weights it fails on at its first step"
        yield "use_adam_mini", wrong, "Leave deepspeed out"
    head = model.hidden_size * model.hidden_size // model.heads  # elements it takes for a head's
    split = [linear.name for linear in model.linears
             if linear.name in ("q_proj", "k_proj") and linear.in_features * linear.out_features % head]  # fmt: skip
    if recipe.finetuning == "lora":
        yield "use_adam_mini", "Adam-mini on adapters, which it can't cut into heads", "Set finetuning_type: full"
    elif split:
        wrong = f"Adam-mini on {model.name}, whose {' and '.join(split)} it can't cut into heads"
        yield "use_adam_mini", wrong, "Leave it out"


def update_for(recipe: Recipe, tensor: Tensor, element_bytes: int) -> Update:
    """What updating `tensor` takes, by one of these or by the Trainer's `optim`."""
    if not owned(recipe):
        return update_of(recipe, tensor, element_bytes)
    if recipe.low_rank is not None:
        return _low_rank(recipe.low_rank, tensor, element_bytes)
    if recipe.use_adam_mini:
        return _adam_mini(tensor, element_bytes)
    return _muon(tensor, element_bytes)


def _adam(tensor: Tensor, element_bytes: int, copies: int) -> Update:
    one = tensor.elements * element_bytes
    return Update(kept=(one, one), temporary=copies * one)


def _muon(tensor: Tensor, element_bytes: int) -> Update:
    """A momentum for a matrix; Newton-Schulz has the gradient, four bf16 matrices like it and two squares of its
    smaller side, beside the update of the tensor before. Adam for tables and vectors."""
    if not _orthogonalized(tensor):
        return _adam(tensor, element_bytes, copies=2)
    one, side = tensor.elements * element_bytes, min(tensor.shape)
    return Update(kept=(one,), temporary=one + 5 * tensor.elements * BF16 + 2 * side * side * BF16)


def _orthogonalized(tensor: Tensor) -> bool:
    return tensor.role not in _TABLES and len(tensor.shape) == 2


def held_for(recipe: Recipe, tensors: Sequence[Tensor], tensor: Tensor) -> int:
    """Bytes that are held while `tensor` is updated: Muon's step goes on to Adam's tensors, and still names the update
    of its own last one."""
    matrices = [one for one in tensors if _orthogonalized(one)] if recipe.use_muon else []
    return matrices[-1].elements * BF16 if matrices and not _orthogonalized(tensor) else 0


def _adam_mini(tensor: Tensor, element_bytes: int) -> Update:
    """A momentum, and one second moment a row; of q and k one a head, of a norm one: too few to count. Biases have
    Adam's two. The update exists twice."""
    one = tensor.elements * element_bytes
    if tensor.name.endswith(".bias"):
        return Update(kept=(one, one), temporary=2 * one)
    rows = tensor.shape[0] if len(tensor.shape) == 2 and tensor.name not in ("q_proj", "k_proj") else 0
    return Update(kept=(one, rows * element_bytes), temporary=2 * one)


def _low_rank(settings: LowRank, tensor: Tensor, element_bytes: int) -> Update:
    """Moments of the gradient projected to `rank`, and the projection. Other tensors have Adam's two; Python's names
    of the last of them still hold its temporaries when the next is updated, unless each has an optimizer of its own."""
    if tensor.role != "linear" or not _targeted(settings, tensor):
        untied_head = tensor.role == "head" and not settings.layerwise
        return _adam(tensor, element_bytes, copies=3 if untied_head else 2)
    rows, columns = tensor.shape
    side = min(rows, columns)
    rank = settings.rank if settings.random else min(settings.rank, side)
    left, right = _sides(settings.projection, rows, columns)
    moment = (rank if left else rows) * (rank if right else columns) * element_bytes
    vectors = rank
    if not settings.random and element_bytes == FP32:
        vectors = side  # U[:, :rank] and Vh[:rank] are views, which keep all singular vectors (get_orthogonal_matrix)
    projection = (left * rows + right * columns) * vectors * element_bytes
    one = tensor.elements
    remade = 0 if element_bytes == FP32 else one * FP32  # the gradient, cast
    if not settings.random:  # singular vectors; the decomposition's own workspace is not known
        remade += side * (rows + columns) * FP32
    return Update(kept=(moment, moment, projection), temporary=max(remade, 2 * one * element_bytes))


def _targeted(settings: LowRank, tensor: Tensor) -> bool:
    return "all" in settings.targets or any(target in tensor.name for target in settings.targets)


def _sides(projection: str, rows: int, columns: int) -> tuple[bool, bool]:
    """Does a matrix stand left, right of the gradient? `std` shortens the longer side, `reverse_std` the shorter."""
    if projection == "full":
        return True, True
    tall = rows >= columns
    right = projection == "right" or (projection == "std" and tall) or (projection == "reverse_std" and not tall)
    return not right, right
