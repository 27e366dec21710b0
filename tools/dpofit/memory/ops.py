"""Operators of a decoder layer on the tape: linear with and without adapter, RMSNorm, gated MLP, residual.

Sources: transformers 5.5.4 models/qwen2/modeling_qwen2.py; peft 0.18.1 tuners/lora/layer.py; liger-kernel 0.8.5
ops/swiglu.py. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from dpofit.memory.dora import DoraLinear
from dpofit.memory.norms import rms_norm
from dpofit.memory.quantized import quantized_linear
from dpofit.memory.spec import BF16, FP32, LayerSpec, Lora
from dpofit.memory.tape import BARE, Mark, Storage, Tape, Value
from dpofit.models.shape import Linear


class Ops:
    """The operators, writing to one tape."""

    def __init__(self, spec: LayerSpec, tape: Tape) -> None:
        self.spec, self.tape = spec, tape

    # linear layers
    def linear(self, x: Value, linear: Linear) -> Value:
        """F.linear of a base module, with its adapter when it is a target."""
        spec, lora = self.spec, self.spec.lora
        if lora is None or linear.name.rpartition(".")[2] not in lora.targets:
            return self._frozen_or_trained(x, linear)
        if spec.lora_active:
            return DoraLinear(self, linear, lora).forward(x) if lora.dora else self._lora_linear(x, linear, lora)
        self.tape.mark("pre", f"{linear.name}.lora_A")  # peft's layer around the base: see _lora_linear
        y = self._frozen_or_trained(x, linear)
        self.tape.mark("post", f"{linear.name}.lora_A")
        return y

    def _frozen_or_trained(self, x: Value, linear: Linear) -> Value:
        if self.spec.quantization is not None:
            return quantized_linear(self.spec, self.tape, x, linear, self.spec.quantization)
        return self.base_linear(x, linear)

    def base_linear(
        self, x: Value, linear: Linear, on_weight_gradient: Callable[[Storage], None] | None = None
    ) -> Value:
        """A module's own weight, its bias too. `on_weight_gradient` takes the gradient, which else is handed over."""
        spec, tape = self.spec, self.tape
        trained = linear.name in spec.trained
        weight_count = linear.in_features * linear.out_features
        inputs = spec.tokens * linear.in_features
        tape.mark("pre", linear.name)
        cast: Storage | None = None
        if x.storage.size_bytes == inputs * FP32:
            # autocast casts the fp32 activation anew for every linear; the copy is what backward saves
            cast = tape.new(f"{linear.name}.cast", inputs * BF16, "activations")
        weight_cast = self.weight_cast(linear.name, weight_count) if spec.wide(linear.name) else None
        wide_weight = Value(weight_cast, trained) if weight_cast is not None else None

        def handed(gradient: Storage) -> None:
            if on_weight_gradient is not None:
                on_weight_gradient(gradient)
            else:
                tape.weight_gradient(gradient, linear.name, weight_count)

        if wide_weight is not None:  # a node of its own: when it runs, what the product saved has gone
            tape.node(wide_weight, [], lambda _: handed(tape.new("wide_grad", weight_count * FP32, "gradients")))
        out = tape.new(f"{linear.name}.out", spec.tokens * linear.out_features * BF16, "activations")
        y = Value(out, x.needs_grad or trained)
        source = cast or x.storage
        unrounded = trained and wide_weight is None and on_weight_gradient is None and tape.sums is not None

        def backward(grad: Storage) -> None:
            gradient: Storage | None = None
            if x.needs_grad:
                gradient = tape.new(f"{linear.name}.grad_in", inputs * BF16, "activation_grads")
                # zero/linear.py, longdpo/unrounded.py: matmul, whose result is no view
                gradient.view = not (spec.linears_save_inputs or unrounded)
            if unrounded:
                mark = Mark("grad", linear.name, weight_count, weight_count * BF16)
                tape.add_to_sum(tape.new("new_grad", weight_count * FP32, "gradients"), mark)
            elif trained:
                narrow = tape.new("new_grad", weight_count * BF16, "gradients")
                if wide_weight is None:
                    tape.after_node(lambda: handed(narrow))
                else:
                    tape.give(wide_weight, narrow)
                if linear.bias:
                    self.weight_gradient(f"{linear.name}.bias", linear.out_features)
            if gradient is not None:
                if cast is not None:  # back to the fp32 residual stream
                    wide = tape.new(f"{linear.name}.grad_cast", inputs * FP32, "activation_grads")
                    tape.drop(gradient)
                    gradient = wide
                tape.give(x, gradient)

        saved = [source] if trained or spec.linears_save_inputs else []
        tape.node(y, [*saved, weight_cast] if weight_cast is not None else saved, backward, linear.name)
        tape.drop(cast)
        self.keep_weight_casts(weight_cast)
        tape.mark("post", linear.name)
        return y

    def weight_cast(self, module: str, elements: int) -> Storage:
        """Autocast casts an fp32 weight once and keeps the copy to the end of the forward (autocast_mode.cpp)."""
        size_bytes = 0 if self.tape.casts_cached else elements * BF16
        return self.tape.new(f"{module}.weight_cast", size_bytes, "autocast_cache")

    def keep_weight_casts(self, *casts: Storage | None) -> None:
        for cast in casts:
            if cast is not None and self.tape.weight_casts is not None:
                self.tape.weight_casts.append(cast)
            else:
                self.tape.drop(cast)

    def _lora_linear(self, x: Value, linear: Linear, lora: Lora) -> Value:
        """peft tuners/lora/layer.py Linear.forward: result + lora_B(lora_A(dropout(x))) * scaling."""
        spec, tape = self.spec, self.tape
        name = linear.name
        # peft's layer around base and adapter reads lora_A.weight's dtype, at first while that is partitioned: ZeRO-3
        # takes it for a parameter of that layer too (deepspeed parameter_offload.py ZeROOrderedDict)
        tape.mark("pre", f"{name}.lora_A")
        around = Value(tape.new(f"{name}.hooks", 0, "activation_grads"), True)
        tape.node(around, [], lambda _: tape.mark("post_backward", f"{name}.lora_A"))
        tape.drop(around.storage)
        base = self._frozen_or_trained(x, linear)
        inputs, outputs = spec.tokens * linear.in_features, spec.tokens * linear.out_features
        # fp32 adapters: _cast_input_dtype brings x to fp32; autocast then casts down again, and saves that copy; but
        # peft's tuners/lora/bnb.py leaves x to autocast
        bnb = spec.quantization is not None and spec.quantization.method == "bnb"
        upcast = lora.adapter_bytes == FP32 and not (bnb and spec.autocast)
        width = FP32 if upcast and not spec.autocast else BF16  # bytes an element of what adapters compute
        x_is_wide = x.storage.size_bytes == inputs * FP32
        wide: Storage | None = None
        saved_in = tape.hold(x.storage)
        if upcast or x_is_wide:
            tape.drop(saved_in)
            wide = tape.hold(x.storage) if x_is_wide else tape.new(f"{name}.lora_wide", inputs * FP32, "activations")
            saved_in = tape.hold(wide) if width == FP32 else tape.new(f"{name}.lora_in", inputs * BF16, "activations")
        dropped: Storage | None = None
        if lora.dropout:
            dropped = tape.new(f"{name}.lora_dropout", inputs * width, "activations")
            mask = tape.new(f"{name}.lora_mask", inputs, "activations")
        casts: list[Storage] = []
        if lora.adapter_bytes == FP32 and spec.autocast:
            casts = [self.weight_cast(f"{name}.lora_A", lora.rank * linear.in_features),
                     self.weight_cast(f"{name}.lora_B", lora.rank * linear.out_features)]  # fmt: skip
        tape.mark("pre", BARE)  # lora_dropout, at least an Identity
        tape.mark("pre", BARE)  # lora_A
        a = tape.new(f"{name}.lora_a", spec.tokens * lora.rank * width, "activations")
        if not tape.grad:
            tape.drop(saved_in)
        tape.mark("pre", f"{name}.lora_B")
        b = tape.new(f"{name}.lora_b", outputs * width, "activations")
        tape.mark("post", f"{name}.lora_B")
        scaled = tape.new(f"{name}.lora_scaled", outputs * width, "activations")
        tape.drop(b)
        narrows_first = bnb and width == FP32  # peft's tuners/lora/bnb.py: output.to(expected_dtype), then the sum
        if narrows_first:
            narrow = tape.new(f"{name}.lora_narrow", outputs * BF16, "activations")
            tape.drop(scaled)
            scaled = narrow
        total = tape.new(f"{name}.lora_out", scaled.size_bytes, "activations")
        y = summed = Value(total, True)
        tape.drop(scaled, base.storage)
        widened: list[Storage] = []  # the sum's fp32 gradient
        if width == FP32 and not narrows_first:  # result.to(torch_result_dtype), a node of its own
            y = Value(tape.new(f"{name}.lora_result", outputs * BF16, "activations"), True)
            tape.drop(total)
        tape.drop(wide)

        def widen(grad: Storage) -> None:
            widened.append(tape.new(f"{name}.grad_total", outputs * FP32, "activation_grads"))
            tape.give(summed, tape.new(f"{name}.grad_sum", 0, "activation_grads"))

        def backward(grad: Storage) -> None:
            tape.mark("pre_backward", f"{name}.lora_A")
            tape.give(around, tape.new(f"{name}.hooks", 0, "activation_grads"))
            if widened:
                total_grad = widened.pop()
                base_grad = tape.new(f"{name}.grad_base", outputs * BF16, "activation_grads")
            else:
                total_grad = tape.new(f"{name}.grad_total", outputs * FP32 if width == FP32 else 0, "activation_grads")
                base_grad = tape.hold(grad)
            scaled_grad = tape.new(f"{name}.grad_scaled", outputs * width, "activation_grads")
            tape.drop(total_grad)
            tape.mark("pre_backward", f"{name}.lora_B")
            a_grad = tape.new(f"{name}.grad_a", spec.tokens * lora.rank * width, "activation_grads")
            self.adapter_gradient(f"{name}.lora_B", lora.rank * linear.out_features, lora)
            tape.mark("post_backward", f"{name}.lora_B")
            tape.drop(scaled_grad)
            tape.mark("pre_backward", BARE)
            self.adapter_gradient(f"{name}.lora_A", lora.rank * linear.in_features, lora)
            if x.needs_grad:
                low = tape.new(f"{name}.grad_lora_in", inputs * width, "activation_grads")
                if dropped is None:
                    tape.drop(saved_in)
                if upcast or x_is_wide:
                    up = low if width == FP32 else tape.new(f"{name}.grad_lora_wide", inputs * FP32, "activation_grads")
                    if up is not low:
                        tape.drop(low)
                    low = tape.hold(up) if x_is_wide else tape.new(
                        f"{name}.grad_lora_down", inputs * BF16, "activation_grads")  # fmt: skip
                    tape.drop(up)
                low.view = not (upcast or x_is_wide or spec.linears_save_inputs)
                tape.give(x, low)
            elif dropped is None:
                tape.drop(saved_in)
            tape.mark("pre_backward", BARE)
            tape.drop(a_grad)
            tape.give(base, base_grad)

        saved = [a] if dropped is None else [mask, dropped, a]  # backward itself lets go of the input
        tape.node(summed, saved + casts, backward)
        if y is not summed:
            tape.node(y, [], widen)
        self.keep_weight_casts(*casts)
        tape.drop(saved_in if tape.grad and dropped is not None else None, a, dropped)
        if lora.dropout:
            tape.drop(mask)
        tape.mark("post", f"{name}.lora_A")
        return y

    def adapter_gradient(self, module: str, elements: int, lora: Lora) -> None:
        computed_wide = lora.adapter_bytes == FP32 and not self.spec.autocast
        self.weight_gradient(module, elements, lora.adapter_bytes, computed_wide)

    def weight_gradient(
        self, module: str, elements: int, adapter_bytes: int | None = None, computed_wide: bool = False
    ) -> None:
        """A weight's gradient appears: bf16, then fp32 when the weight is fp32 (`computed_wide`: at once). The mark's
        reader frees it."""
        wide = self.spec.wide_training if adapter_bytes is None else adapter_bytes == FP32
        gradient = narrow = self.tape.new(
            "new_grad", elements * (FP32 if wide and computed_wide else BF16), "gradients"
        )
        if wide and not computed_wide:
            gradient = self.tape.new("wide_grad", elements * FP32, "gradients")
            self.tape.drop(narrow)
        self.tape.weight_gradient(gradient, module, elements)

    # norms
    def rms_norm(self, x: Value, name: str, width: int, count: int) -> Value:
        return rms_norm(self, x, name, width, count)

    # MLP
    def gated_mlp(self, x: Value, gate: Linear, up: Linear, down: Linear) -> Value:
        """down(silu(gate(x)) * up(x)); Liger's SiLUMul saves both inputs and writes both gradients over them."""
        spec, tape = self.spec, self.tape
        inner = spec.tokens * gate.out_features * BF16
        g = self.linear(x, gate)
        if spec.liger:
            u = self.linear(x, up)
            product = Value(tape.new("mlp.product", inner, "activations"), g.needs_grad or u.needs_grad)
            gate_storage, up_storage = g.storage, u.storage

            def liger_backward(grad: Storage) -> None:
                tape.give(g, tape.hold(gate_storage))
                tape.give(u, tape.hold(up_storage))

            tape.node(product, [gate_storage, up_storage], liger_backward)
            tape.drop(g.storage, u.storage)
        else:
            tape.mark("pre", BARE)  # act_fn
            activated = Value(tape.new("mlp.silu", inner, "activations"), g.needs_grad)

            def silu_backward(grad: Storage) -> None:
                tape.mark("pre_backward", BARE)
                tape.give(g, tape.new("mlp.grad_gate", inner, "activation_grads"))

            tape.node(activated, [g.storage], silu_backward)
            tape.drop(g.storage)
            u = self.linear(x, up)
            product = Value(tape.new("mlp.product", inner, "activations"), g.needs_grad or u.needs_grad)

            def mul_backward(grad: Storage) -> None:
                silu_grad = tape.new("mlp.grad_silu", inner, "activation_grads")
                tape.give(u, tape.new("mlp.grad_up", inner, "activation_grads"))
                tape.give(activated, silu_grad)

            tape.node(product, [activated.storage, u.storage], mul_backward)
            tape.drop(activated.storage, u.storage)
        y = self.linear(product, down)
        tape.drop(product.storage)
        return y

    def fused_gated_mlp(self, x: Value, gate_up: Linear, down: Linear) -> Value:
        """modeling_phi3.py Phi3MLP: gate and up are halves of one projection; backward concatenates their gradients."""
        spec, tape = self.spec, self.tape
        both = self.linear(x, gate_up)
        inner = spec.tokens * down.in_features * BF16
        if spec.liger:
            return self._halves_through(both, self._liger_halves(both, inner), down)
        tape.mark("pre", BARE)  # activation_fn
        activated = tape.new("mlp.silu", inner, "activations")
        product = Value(tape.new("mlp.product", inner, "activations"), both.needs_grad)

        def backward(grad: Storage) -> None:
            up_grad = tape.new("mlp.grad_up", inner, "activation_grads")
            silu_grad = tape.new("mlp.grad_silu", inner, "activation_grads")
            tape.mark("pre_backward", BARE)
            tape.drop(activated)
            gate_grad = tape.new("mlp.grad_gate", inner, "activation_grads")
            tape.drop(silu_grad)
            whole = tape.new("mlp.grad_gate_up", 2 * inner, "activation_grads")
            tape.drop(gate_grad, up_grad)
            tape.give(both, whole)

        tape.node(product, [both.storage], backward)
        if not (tape.grad and product.needs_grad):
            tape.drop(activated)  # else where its own node lets go of it
        return self._halves_through(both, product, down)

    def _liger_halves(self, both: Value, inner: int) -> Value:
        """liger transformers/swiglu.py LigerPhi3SwiGLUMLP: its kernel wants each half contiguous, and saves the copies,
        over which it writes their gradients."""
        tape = self.tape
        gate, up = (tape.new(f"mlp.{name}", inner, "activations") for name in ("gate", "up"))
        product = Value(tape.new("mlp.product", inner, "activations"), both.needs_grad)

        def backward(grad: Storage) -> None:
            tape.give(both, tape.new("mlp.grad_gate_up", 2 * inner, "activation_grads"))

        tape.node(product, [gate, up], backward)
        tape.drop(gate, up)
        return product

    def _halves_through(self, both: Value, product: Value, down: Linear) -> Value:
        """`down` of the product, while the names `gate` and `up_states` are views of both."""
        y = self.linear(product, down)
        self.tape.drop(product.storage, both.storage)
        return y

    def boundary(self, y: Value, module: str) -> Value:
        """The output of a container module: nothing is allocated, but ZeRO-3's hooks fire there."""
        tape = self.tape
        out = Value(tape.hold(y.storage), y.needs_grad)

        def backward(grad: Storage) -> None:
            tape.mark("pre_backward", module)
            tape.give(y, tape.hold(grad))

        tape.node(out, [], backward)
        tape.drop(y.storage)
        tape.mark("post", module)
        return out

    def residual(self, x: Value, y: Value, tag: str) -> Value:
        """x + y; both get the gradient as it is. Phi-3 has a dropout module before it."""
        tape = self.tape
        dropout = self.spec.model.family.residual_dropout
        if dropout:
            tape.mark("pre", BARE)
        size_bytes = self.spec.hidden * self.spec.residual_bytes // BF16
        out = Value(tape.new(tag, size_bytes, "activations"), x.needs_grad or y.needs_grad)

        def backward(grad: Storage) -> None:
            tape.give(x, tape.hold(grad))
            if dropout:
                tape.mark("pre_backward", BARE)
            if self.spec.residual_bytes == FP32:
                tape.give(y, tape.new(f"{tag}.grad_bf16", self.spec.hidden, "activation_grads"))
            else:
                tape.give(y, tape.hold(grad))

        tape.node(out, [], backward)
        return out
