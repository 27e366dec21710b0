"""BAdam: full tuning a decoder layer at a time. Whose turn is modelled, what stops a run, the step's fp32 gradients.

Sources: badam 1.4 block_optim.py; llamafactory 0.9.5 train/trainer_utils.py:412-448, hparams/parser.py:393-398.
Embeddings, head and the last norm are in no block (include_embedding, include_lm_head: False). At a switch the old
layer's master and moments are still there when the new one's master comes (block_optim.py:490-528): no more than the
step before had with its fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dpofit.memory.program import Event, Repeat
from dpofit.models.shape import ModelShape
from dpofit.recipe.recipe import Badam, Recipe

STEPPED = ("adamw_torch", "adamw_torch_fused")  # whose states may be thrown away at a switch, and were traced


def layer_in_turn(badam: Badam | None) -> int | None:
    """The layer whose turn needs most of those that come. All are of one size; the lower it is, the more layers above
    backward goes through, and LLaMA-Factory checkpoints only layers that train (checkpointing.py:79-101)."""
    if badam is None:
        return None
    return badam.start_block if badam.switch_mode == "fixed" and badam.start_block is not None else 0


def badam_problems(recipe: Recipe, model: ModelShape, world_size: int) -> Iterator[tuple[str, str, str]]:
    """(key, what can't run or isn't modelled, the way out). The failures are those of the real code, run."""
    badam = recipe.badam
    if badam is None:
        return
    if badam.mode != "layer":
        yield "badam_mode", "BAdam by ratio is not modelled yet", "Modelled: layer"
    if recipe.zero is not None:
        why = "is not modelled yet" if recipe.zero.stage == 3 else "below stage 3, which LLaMA-Factory refuses"
        yield "use_badam", f"BAdam with DeepSpeed {why}", "Modelled: one GPU, without DeepSpeed"
    elif world_size > 1:
        yield "use_badam", f"BAdam on {world_size} GPUs without ZeRO-3, which LLaMA-Factory refuses", "Use one GPU"
    if recipe.finetuning != "full":
        yield "finetuning_type", f"BAdam with {recipe.finetuning} is not modelled yet", "Set finetuning_type: full"
    if recipe.optim not in STEPPED:
        yield "optim", f"{recipe.optim} under use_badam is not modelled yet", f"Modelled: {', '.join(STEPPED)}"
    if model.model_type == "qwen":  # infer_param_groups looks for "layers."; IndexError: list index out of range
        yield "use_badam", f"BAdam on {model.name}, whose layers it doesn't find", "Leave it out"
    last = model.layers - 1
    if badam.start_block is not None and not 0 <= badam.start_block <= last:
        yield "badam_start_block", f"no layer is number {badam.start_block}", f"Give one from 0 to {last}"
    if abs(badam.switch_interval or 0) < 2:  # any number is divisible by -1 (block_optim.py:225)
        wrong = f"a switch at every step, which {badam.switch_interval} is to badam"
        yield "badam_switch_interval", wrong, "For one block: badam_switch_mode: fixed"
    if badam.switch_mode == "fixed" and badam.start_block is None:  # AttributeError: current_block_idx
        yield "badam_switch_mode", "fixed without badam_start_block, with which badam fails", "Give badam_start_block"
    if badam.switch_mode == "random" and badam.start_block is not None:  # AttributeError: block_order
        yield "badam_start_block", "random with badam_start_block, with which badam fails", "Leave it out"


def widened(gradients: list[Event | Repeat]) -> tuple[list[Event | Repeat], list[Event | Repeat]]:
    """_grad_to_hp: one by one each gradient's fp32 copy comes, and it goes. `gradients`: their ends. Also the copies'
    ends, after the update (_clean_hp_grad)."""
    came: list[Event | Repeat] = []
    ends: list[Event | Repeat] = []
    for item in gradients:
        events = item.events if isinstance(item, Repeat) else (item,)
        copies = [event._replace(tag=f"fp32.{event.tag}", size_bytes=-2 * event.size_bytes) for event in events]
        both = tuple(one for pair in zip(copies, events, strict=True) for one in pair)
        gone = tuple(copy._replace(size_bytes=-copy.size_bytes) for copy in copies)
        came += [replace(item, events=both)] if isinstance(item, Repeat) else both
        ends += [replace(item, events=gone)] if isinstance(item, Repeat) else gone
    return came, ends
