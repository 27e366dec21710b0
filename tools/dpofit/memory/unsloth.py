"""unsloth's decoder layer on the tape: fused products with adapters, rotary positions, what is written in place.

Sources: unsloth 2026.10.9 models/llama.py:1063-1253 (attention and layer), kernels/fast_lora.py (LoRA_MLP, LoRA_QKV,
LoRA_W), kernels/utils.py:1855-1900 (matmul_lora), kernels/rope_embedding.py:349-375. Sizes are bytes. Its norms are in
norms.py: what they keep is what Liger's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dpofit.memory.ops import Ops
from dpofit.memory.spec import BF16, LayerSpec
from dpofit.memory.tape import Storage, Tape, Value
from dpofit.models.shape import Linear, ModelShape
from dpofit.recipe.recipe import Recipe

MODEL_TYPES = ("llama", "qwen2")  # whose layers are models/llama.py's
UNCOMPILED = "UNSLOTH_BLOCK_COMPILE"  # 0: models/_block_compile.py leaves the layers to eager PyTorch


def unsloth_problems(recipe: Recipe, model: ModelShape, world_size: int) -> Iterator[tuple[str, str, str]]:
    """(key, what can't run or isn't modelled, the way out)."""
    if not recipe.use_unsloth:
        return
    if recipe.environment.get(UNCOMPILED) != "0":
        wrong = "use_unsloth with layers that torch.compile plans, its default,"
        yield "use_unsloth", wrong, f"Set {UNCOMPILED}=0 in the environment, or use use_unsloth_gc"
    if world_size > 1 or recipe.zero is not None:
        right = "Modelled: one GPU, without DeepSpeed"
        yield "use_unsloth", "use_unsloth on several GPUs" if world_size > 1 else "use_unsloth with DeepSpeed", right
    if model.model_type not in MODEL_TYPES:
        yield "use_unsloth", f"use_unsloth on a {model.model_type}", f"Modelled: {', '.join(MODEL_TYPES)}"
    every = "all" in recipe.lora_target or {one.name for one in model.linears} <= set(recipe.lora_target)
    beside = {
        "stage": (recipe.stage != "dpo", "dpo"),  # sft: a fused loss whose chunks follow the memory that is free
        "finetuning_type": (recipe.finetuning != "lora", "lora"),
        "lora_target": (not every, "all"),
        "use_dora": (recipe.use_dora, "false"),
        "additional_target": (bool(recipe.additional_target), "none"),
        "quantization_bit": (recipe.quantization_bit is not None, "none"),
        "ref_model": (recipe.ref_model is not None, "none"),
        "bf16": (not recipe.bf16, "true"),
        "upcast_layernorm": (recipe.upcast_layernorm, "false"),
        "enable_liger_kernel": (recipe.liger, "false"),
        "disable_gradient_checkpointing": (not recipe.gradient_checkpointing, "false"),
        "use_unsloth_gc": (recipe.use_unsloth_gc, "false"),
        "use_reentrant_gc": (not recipe.use_reentrant_gc, "true"),
        "do_eval": (recipe.evaluates, "false"),
    }
    for key, (stands_there, right) in beside.items():
        if stands_there:
            yield key, f"{key} of use_unsloth", f"Modelled: {right}"


class FusedOps:
    """The products of one layer, each a single node, writing to one tape."""

    def __init__(self, spec: LayerSpec, tape: Tape) -> None:
        assert spec.lora is not None
        self.spec, self.tape, self.lora = spec, tape, spec.lora

    def qkv(self, normed: Value) -> tuple[Value, Value, Value]:
        """LoRA_QKV, which keeps its input and writes that input's gradient over it. Qwen 2's projections have biases,
        for which it isn't used: those are peft's (llama.py:5379-5402)."""
        spec, tape = self.spec, self.tape
        linears = spec.model.linears[:3]
        if any(linear.bias for linear in linears):
            ops = Ops(spec, tape)
            q, k, v = (ops.linear(normed, linear) for linear in linears)
            return q, k, v
        q, k, v = (Value(self._product(linear), self._needs_grad(normed)) for linear in linears)

        def backward(grads: Sequence[Storage]) -> None:
            temporaries = [*self._gradient_factors(linears), *self._ranks(3), self._rank()]
            tape.give(normed, tape.hold(normed.storage))
            tape.drop(*temporaries)
            self._gradients(linears)

        _joint(tape, (q, k, v), [normed.storage], backward)
        return q, k, v

    def rope(self, q: Value, k: Value) -> tuple[Value, Value]:
        """Fast_RoPE_Embedding_QK_Positions: in place; the gradients are rotated into new storages."""
        tape = self.tape
        rotated = Value(tape.hold(q.storage), q.needs_grad), Value(tape.hold(k.storage), k.needs_grad)

        def backward(grads: Sequence[Storage]) -> None:
            new = [tape.new("rope.grad", grad.size_bytes, "activation_grads") for grad in grads]
            for x, gradient in zip((q, k), new, strict=True):
                tape.give(x, gradient)

        _joint(tape, rotated, [], backward)
        tape.drop(q.storage, k.storage)
        return rotated

    def out(self, attended: Value) -> Value:
        """LoRA_W of attention's output: keeps its input."""
        spec, tape, linear = self.spec, self.tape, self.spec.model.linears[3]
        y = Value(self._product(linear), self._needs_grad(attended))

        def backward(grad: Storage) -> None:
            temporaries = [*self._gradient_factors([linear]), *self._ranks(1), self._rank()]
            gradient = tape.new(f"{linear.name}.grad_in", spec.tokens * linear.in_features * BF16, "activation_grads")
            tape.drop(*temporaries)
            self._gradients([linear])
            tape.give(attended, gradient)

        tape.node(y, [attended.storage], backward)
        return y

    def mlp(self, normed: Value) -> Value:
        """LoRA_MLP: keeps its input, gate and up. The backward writes the product and both gradients over the product's
        gradient, gate and up, and the input's gradient over the input."""
        spec, tape = self.spec, self.tape
        linears = gate, up, down = spec.model.linears[-3:]
        inner = spec.tokens * gate.out_features * BF16
        e, g = self._product(gate), self._product(up)
        h = tape.new("mlp.product", inner, "activations")
        y = Value(self._product(down), self._needs_grad(normed))

        def backward(grad: Storage) -> None:
            casts = self._adapters(linears)
            product_grad = tape.new("mlp.grad_product", inner, "activation_grads")
            self.tape.drop(self._rank())
            temporaries = [*casts, *self._adapters(linears), *self._ranks(2)]
            tape.give(normed, tape.hold(normed.storage))
            tape.drop(product_grad, *temporaries)
            self._gradients(linears)

        tape.node(y, [normed.storage, e, g], backward)
        tape.drop(e, g, h)
        return y

    def _needs_grad(self, x: Value) -> bool:
        return x.needs_grad or self.spec.lora_active

    def _product(self, linear: Linear) -> Storage:
        """matmul_lora: the product, then the adapter's added to it; fp32 adapters are cast for each."""
        tape, rank = self.tape, self.lora.rank
        out = tape.new(f"{linear.name}.out", self.spec.tokens * linear.out_features * BF16, "activations")
        if self.spec.lora_active:
            a = tape.new(f"{linear.name}.lora_A_cast", rank * linear.in_features * BF16, "workspace")
            low = self._rank()
            tape.drop(a)
            tape.temporary(f"{linear.name}.lora_B_cast", rank * linear.out_features * BF16)
            tape.drop(low)
        return out

    def _rank(self) -> Storage:
        return self.tape.new("lora.low", self.spec.tokens * self.lora.rank * BF16, "workspace")

    def _ranks(self, count: int) -> list[Storage]:
        return [self._rank() for _ in range(count)]

    def _adapters(self, linears: Sequence[Linear]) -> list[Storage]:
        """Both matrices of each linear in bf16."""
        size = sum(self.lora.rank * (linear.in_features + linear.out_features) for linear in linears)
        return [self.tape.new("lora.adapters", size * BF16, "workspace")]

    def _gradient_factors(self, linears: Sequence[Linear]) -> list[Storage]:
        """The adapters as cast again, and their gradients before they are."""
        return [*self._adapters(linears), *self._adapters(linears)]

    def _gradients(self, linears: Sequence[Linear]) -> None:
        ops = Ops(self.spec, self.tape)
        for linear in linears:
            ops.adapter_gradient(f"{linear.name}.lora_A", self.lora.rank * linear.in_features, self.lora)
            ops.adapter_gradient(f"{linear.name}.lora_B", self.lora.rank * linear.out_features, self.lora)


def _joint(
    tape: Tape, outputs: Sequence[Value], saved: list[Storage], backward: Callable[[Sequence[Storage]], None]
) -> None:
    """One node of several outputs: it runs when all their gradients are there."""
    grads: list[Storage] = []

    def arrive(grad: Storage) -> None:
        grads.append(tape.hold(grad))
        if len(grads) == len(outputs):
            backward(tuple(reversed(grads)))  # the last output's came first
            tape.drop(*grads)

    for index, output in enumerate(outputs):
        tape.node(output, saved if index == 0 else [], arrive)
