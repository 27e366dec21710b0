"""The model's tensors one by one: optimizers, ZeRO-1/2's gradient buffers and clipping depend on each one's size."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from dpofit.memory.bands import inside_modules
from dpofit.memory.job import Job

Role = Literal["embedding", "head", "linear", "adapter", "vector", "flat"]


class Tensor(NamedTuple):
    """`times` tensors of one shape. `flat`: a part of the weights as DeepSpeed hands them to an optimizer, 1-d."""

    role: Role
    shape: tuple[int, ...]
    times: int
    name: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def parameters_of(job: Job) -> list[Tensor]:
    """Every parameter of the base model."""
    model = job.model
    table = (model.vocab_size, model.hidden_size)
    found = [Tensor("embedding", table, 1, "embed_tokens")]
    if not model.tied_embeddings:
        found.append(Tensor("head", table, 1, "lm_head"))
    for name, linear in zip(inside_modules(model), model.linears, strict=False):
        found.append(Tensor("linear", (linear.out_features, linear.in_features), model.layers, name))
        if linear.bias:
            found.append(Tensor("vector", (linear.out_features,), model.layers, f"{name}.bias"))
    found += [Tensor("vector", (width,), model.layers, name) for name, width in model.norms]
    found.append(Tensor("vector", (model.hidden_size,), 1, "norm"))
    return found


def trained_tensors(job: Job) -> list[Tensor]:
    """Every trained parameter: the model's own, and two matrices of an adapter at each target."""
    found = own_trained(job)
    if not job.adapters:
        return found
    rank, layers = job.recipe.lora_rank, job.model.layers
    for name, linear in zip(inside_modules(job.model), job.model.linears, strict=False):
        if linear.name in job.lora_targets:
            found.append(Tensor("adapter", (rank, linear.in_features), layers, f"{name}.lora_A"))
            found.append(Tensor("adapter", (linear.out_features, rank), layers, f"{name}.lora_B"))
            if job.recipe.use_dora:
                found.append(Tensor("adapter", (linear.out_features,), layers, f"{name}.lora_magnitude"))
    return found


def own_trained(job: Job) -> list[Tensor]:
    """The base model's parameters in the modules that are trained."""
    modules = job.trained
    found = []
    own = parameters_of(job)
    if job.model.tied_embeddings and "lm_head" in modules.outside:
        own.insert(1, own[0]._replace(role="head", name="lm_head"))
    for tensor in own:
        module = tensor.name.removesuffix(".bias")
        if module == "lm_head" and job.recipe.stage == "rm" and job.recipe.zero is None:
            continue  # a reward model's loss never reaches it; DeepSpeed keeps states for it all the same
        times = int(module in modules.outside) or sum(module in layer for layer in modules.layers)
        if times:
            found.append(tensor._replace(times=times))
    return found


def frozen_tensors(job: Job) -> list[Tensor]:
    """The base model's parameters that stay as they are; of a module that an adapter copies to train, the original."""
    if job.adapters:
        return parameters_of(job)
    trained = {tensor.name: tensor.times for tensor in own_trained(job)}
    rest = [tensor._replace(times=tensor.times - trained.get(tensor.name, 0)) for tensor in parameters_of(job)]
    return [tensor for tensor in rest if tensor.times]


def largest_tensor(job: Job) -> int:
    """Elements of the largest trained tensor."""
    return max((tensor.elements for tensor in trained_tensors(job)), default=0)
