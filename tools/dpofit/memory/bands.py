"""Which of the model's own weights a run trains, and which layers so compute alike: full, freeze, whole modules
beside adapters.

Sources: llamafactory 0.9.5 model/adapter.py:40-145; peft 0.18.1 utils/other.py _set_trainable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from dpofit.memory.badam import layer_in_turn
from dpofit.models.shape import ModelShape
from dpofit.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Selection:
    """The recipe's keys that choose weights."""

    finetuning: str
    freeze_layers: int
    freeze_modules: tuple[str, ...]
    freeze_extra: tuple[str, ...]
    additional_target: tuple[str, ...]
    only_layer: int | None  # BAdam's turn

    @staticmethod
    def of(recipe: Recipe) -> Selection:
        return Selection(
            recipe.finetuning, recipe.freeze_layers, recipe.freeze_modules, recipe.freeze_extra,
            recipe.additional_target, layer_in_turn(recipe.badam),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trained:
    """Modules whose own weights are trained: outside the layers, and of each layer."""

    outside: frozenset[str]
    layers: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive layers that compute alike. `checkpointed`: recomputed in backward; `input_needs_grad`: autograd
    asks for the gradient of the first one's input, or checkpointing makes it ask."""

    first: int
    count: int
    trained: frozenset[str]
    checkpointed: bool
    input_needs_grad: bool
    reached: bool  # backward runs through it


def inside_modules(model: ModelShape) -> tuple[str, ...]:
    """Modules with weights of one layer, as the tape names them; Qwen 1's second c_proj is `mlp.c_proj`."""
    linears: dict[str, None] = {}
    for linear in model.linears:
        linears[f"mlp.{linear.name}" if linear.name in linears else linear.name] = None
    return (*linears, *(name for name, _ in model.norms))


def outside_modules(model: ModelShape) -> tuple[str, ...]:
    """The same outside the layers; a tied head has no weight of its own."""
    return ("embed_tokens", "norm") if model.tied_embeddings else ("embed_tokens", "norm", "lm_head")


_QWEN1 = {
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "c_attn": "attn.c_attn", "c_proj": "attn.c_proj",
    "w1": "mlp.w1", "w2": "mlp.w2", "mlp.c_proj": "mlp.c_proj", "embed_tokens": "wte", "norm": "ln_f",
}  # fmt: skip
_ATTENTION = re.compile(r"(qkv|[qkvo])_(proj|norm)")
_MLP = re.compile(r"(gate|up|down|gate_up)_proj")


def _path(model: ModelShape, module: str, layer: int | None = None) -> str:
    """The module's name in the model, as transformers gives it."""
    qwen1 = model.model_type == "qwen"
    stem, stack = ("transformer", "h") if qwen1 else ("model", "layers")
    name = _QWEN1.get(module, module) if qwen1 else module
    if layer is not None:
        if _ATTENTION.fullmatch(name):
            name = f"self_attn.{name}"
        elif _MLP.fullmatch(name):
            name = f"mlp.{name}"
        return f"{stem}.{stack}.{layer}.{name}"
    return name if module == "lm_head" else f"{stem}.{name}"


def names_to_freeze_by(model: ModelShape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What freeze_trainable_modules and freeze_extra_modules may name."""
    inside = dict.fromkeys(_path(model, name, 0).split(".")[3] for name in inside_modules(model))
    return tuple(inside), tuple(_path(model, name).split(".")[-1] for name in outside_modules(model))


@lru_cache(maxsize=512)
def trained_modules(selection: Selection, model: ModelShape) -> Trained:
    """Raises nothing: names that no module has are scope's to refuse."""
    inside, outside = inside_modules(model), outside_modules(model)
    if selection.finetuning == "lora":  # copies of their own (modules_to_save), a tied head's too
        outside = (*dict.fromkeys((*outside, "lm_head")),)
    if selection.only_layer is not None:
        turn = (frozenset(inside) if layer == selection.only_layer else frozenset() for layer in range(model.layers))
        return Trained(frozenset(), tuple(turn))
    if selection.finetuning == "full":
        return Trained(frozenset(outside), (frozenset(inside),) * model.layers)
    if selection.finetuning == "freeze":
        count = selection.freeze_layers
        chosen = range(max(0, model.layers - count), model.layers) if count > 0 else range(min(-count, model.layers))
        pieces = [f".{layer}.{'' if name == 'all' else name}" for name in selection.freeze_modules for layer in chosen]
        pieces += selection.freeze_extra

        def is_trained(path: str) -> bool:  # adapter.py:137: a piece found anywhere in the parameter's name
            return any(piece in f"{path}.weight" for piece in pieces)
    else:

        def is_trained(path: str) -> bool:  # peft: the module's name ends with the target
            return path.endswith(selection.additional_target) if selection.additional_target else False

    layers = tuple(
        frozenset(name for name in inside if is_trained(_path(model, name, layer))) for layer in range(model.layers)
    )
    return Trained(frozenset(name for name in outside if is_trained(_path(model, name))), layers)


@lru_cache(maxsize=512)
def own_parameters(selection: Selection, model: ModelShape) -> int:
    """How many of the model's own parameters are trained."""
    trained, inside = trained_modules(selection, model), inside_modules(model)
    sizes = [linear.parameters for linear in model.linears] + [width for _, width in model.norms]
    elements = dict(zip(inside, sizes, strict=True))
    outside = {"embed_tokens": model.embedding_parameters, "norm": model.hidden_size}
    outside["lm_head"] = model.embedding_parameters
    return sum(elements[name] for modules in trained.layers for name in modules) + sum(
        outside[name] for name in trained.outside
    )


def bands(trained: Trained, adapters: bool, checkpointing: bool) -> tuple[Band, ...]:
    """Layers grouped from the bottom up. LLaMA-Factory checkpoints only layers with trainable parameters, whose input
    it makes require a gradient (model_utils/checkpointing.py:79-101)."""

    def kinds() -> Iterator[tuple[frozenset[str], bool, bool, bool]]:
        graph = "embed_tokens" in trained.outside  # whether the graph has begun below
        for modules in trained.layers:
            own = bool(modules) or adapters
            checkpointed = checkpointing and own
            needed = graph or checkpointed
            graph = graph or own
            yield modules, checkpointed, needed, graph

    found, first = [], 0
    for kind, group in groupby(kinds()):
        count = sum(1 for _ in group)
        found.append(Band(first, count, *kind))
        first += count
    return tuple(found)
