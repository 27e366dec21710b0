"""What an optimizer keeps for each trained tensor, and what it needs while it updates one or all of them.

Sources: transformers 5.5.4 trainer_optimizer.py (names), optimization.py (Adafactor); torch 2.13 optim/*.py;
bitsandbytes 0.50.2 optim/optimizer.py, ademamix.py; torchao 0.18.0 optim/adam.py; schedulefree 1.4.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpofit.memory.spec import FP32
from dpofit.memory.tensors import Tensor
from dpofit.recipe.recipe import Recipe

BNB_BLOCK = 256  # one fp32 absmax for each so many 8-bit values
BNB_SMALLEST_8BIT = 4096  # elements; smaller tensors keep fp32 (min_8bit_size)
BNB_SMALLEST_PAGED = 100_000  # elements; smaller ones are not paged (get_state_buffer)


@dataclass(frozen=True, slots=True)
class Rule:
    """`states`: buffers as large as the weight, of `bits` each (0: the weight's own dtype), in `managed` CUDA memory
    or not. `together`: temporaries as large as all trained weights at once (foreach); `decay_copies` more when
    weight_decay is set."""

    states: int
    bits: int = 0
    managed: bool = False
    together: int = 0
    decay_copies: int = 0
    library: str = "torch"


OPTIMIZERS: dict[str, Rule] = {
    "adamw_torch": Rule(2, together=1),  # adamw.py _multi_tensor_adamw: exp_avg_sq_sqrt
    "adamw_torch_fused": Rule(2),
    "sgd": Rule(0, decay_copies=1),
    "adagrad": Rule(1, together=2, decay_copies=1),  # adagrad.py: std and minus_clr x gradients
    "rmsprop": Rule(1, together=1, decay_copies=1),
    "adafactor": Rule(0, library="adafactor"),
    "schedule_free_adamw": Rule(2, together=1),  # z and exp_avg_sq; denom
    "schedule_free_radam": Rule(2, together=1),
    "schedule_free_sgd": Rule(1),
    "adamw_torch_8bit": Rule(2, 8, library="torchao"),
    "adamw_torch_4bit": Rule(2, 4, library="torchao"),
    "adamw_bnb_8bit": Rule(2, 8, library="bnb"),
    "adamw_8bit": Rule(2, 8, library="bnb"),
    "paged_adamw_32bit": Rule(2, 32, managed=True, library="bnb"),
    "paged_adamw_8bit": Rule(2, 8, managed=True, library="bnb"),
    "ademamix": Rule(3, 32, library="bnb"),
    "ademamix_8bit": Rule(3, 8, library="bnb"),
    "paged_ademamix_32bit": Rule(3, 32, managed=True, library="bnb"),
    "paged_ademamix_8bit": Rule(3, 8, managed=True, library="bnb"),
    "lion_32bit": Rule(1, 32, library="bnb"),
    "lion_8bit": Rule(1, 8, library="bnb"),
    "paged_lion_32bit": Rule(1, 32, managed=True, library="bnb"),
    "paged_lion_8bit": Rule(1, 8, managed=True, library="bnb"),
    "rmsprop_bnb": Rule(1, 32, library="bnb"),
    "rmsprop_bnb_8bit": Rule(1, 8, library="bnb"),
    "rmsprop_bnb_32bit": Rule(1, 32, library="bnb"),
}


@dataclass(frozen=True, slots=True)
class Update:
    """Bytes for one tensor: `kept` from its first update on, one entry an allocation; `managed` likewise, in memory
    the driver can move to the host; `temporary`, the most that comes and goes while this tensor is updated."""

    kept: tuple[int, ...] = ()
    managed: int = 0
    temporary: int = 0


def update_of(recipe: Recipe, tensor: Tensor, element_bytes: int) -> Update:
    """What updating `tensor` takes; `element_bytes` of its weights and gradients as the optimizer sees them."""
    rule = OPTIMIZERS[recipe.optim]
    if rule.library == "adafactor":
        return _adafactor(tensor, element_bytes)
    if rule.library == "bnb":
        return _bitsandbytes(rule, tensor)
    if rule.library == "torchao":
        return _torchao(rule, tensor, element_bytes)
    return Update(kept=(tensor.elements * element_bytes,) * rule.states)


def copies_of_all(recipe: Recipe) -> int:
    """Temporaries as large as all trained weights, alive at once (torch's foreach)."""
    rule = OPTIMIZERS[recipe.optim]
    return rule.together + (rule.decay_copies if recipe.weight_decay else 0)


def offloaded_states(recipe: Recipe) -> int:
    """fp32 states on the host: accelerate 1.11.0 map_pytorch_optim_to_deepspeed puts DeepSpeedCPUAdam in the place of
    every optimizer but 32-bit Lion."""
    return 1 if recipe.optim in ("lion_32bit", "paged_lion_32bit") else 2


def _bitsandbytes(rule: Rule, tensor: Tensor) -> Update:
    """States are fp32 or, blockwise, 8 bits; never the weight's bf16. transformers keeps embeddings in 32 bits beside
    an 8-bit optimizer (trainer.py create_optimizer), unless DeepSpeed flattened them out of its sight."""
    n = tensor.elements
    eight = rule.bits == 8 and n >= BNB_SMALLEST_8BIT and tensor.role != "embedding"
    buffers = (n * (1 if eight else FP32),) * rule.states
    absmax = (math.ceil(n / BNB_BLOCK) * FP32,) * rule.states if eight else ()
    if rule.managed and n >= BNB_SMALLEST_PAGED:
        return Update(kept=absmax, managed=sum(buffers))
    return Update(kept=buffers + absmax)


def _torchao(rule: Rule, tensor: Tensor, element_bytes: int) -> Update:
    """Codes and one fp32 scale a block of 256 (transformers passes block_size 256 for both widths). The update is one
    compiled function; the fp32 moments of one tensor are taken to exist at once, the most it can need."""
    n = tensor.elements
    if n < 4096 or n % 256:
        return Update(kept=(n * element_bytes,) * rule.states)
    kept = (n * rule.bits // 8, n // 256 * FP32) * rule.states
    return Update(kept=kept, temporary=2 * n * FP32)


def _adafactor(tensor: Tensor, element_bytes: int) -> Update:
    """optimization.py Adafactor.step: a row and a column of fp32 sums for a matrix, one as large as the weight for a
    vector. bf16 gradient and weight are first copied to fp32; `update` exists twice."""
    rows = tensor.shape
    kept = (rows[0] * FP32, rows[1] * FP32) if len(rows) == 2 else (tensor.elements * FP32,)
    copies = 0 if element_bytes == FP32 else 2
    return Update(kept=kept, temporary=(copies + 2) * tensor.elements * FP32)
