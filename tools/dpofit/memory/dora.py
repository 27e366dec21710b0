"""DoRA's linear layer on the tape: every forward makes the whole adapted weight again, to measure its columns.

Source: peft 0.18.1 tuners/lora/dora.py DoraLinearLayer.forward, tuners/lora/variants.py DoraLinearVariant.forward;
without dropout, over a base in 16 bits. Sizes are bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpofit.memory.spec import BF16, FP32, Lora
from dpofit.memory.tape import Storage, Value
from dpofit.models.shape import Linear

if TYPE_CHECKING:
    from dpofit.memory.ops import Ops


class DoraLinear:
    """One target's forward and its backward graph: result + (m - 1) * result + m * lora_B(lora_A(x)) * scaling."""

    def __init__(self, ops: Ops, linear: Linear, lora: Lora) -> None:
        self.ops, self.linear, self.lora = ops, linear, lora
        self.spec, self.tape, self.name = ops.spec, ops.tape, linear.name
        self.inputs = self.spec.tokens * linear.in_features
        self.outputs = self.spec.tokens * linear.out_features
        # bytes an element: of x as the adapter gets it and of what the magnitude multiplies; of what A and B compute
        self.around = lora.adapter_bytes
        self.width = BF16 if self.spec.autocast else lora.adapter_bytes

    def forward(self, x: Value) -> Value:
        """The output, held; the caller still holds `x`."""
        tape, name = self.tape, self.name
        base = self.ops.base_linear(x, self.linear)
        wide = self._widened(x)
        tape.mark("pre", name)  # DeepSpeed takes the base's weight for the magnitude module's too: it is read there
        casts = self._weight_casts()
        measured = self._measured_weight()
        low = self._lora(wide)
        scaled = self._without_bias(base)
        share = self._times_magnitude(scaled, f"{name}.dora_base")
        product = self._times_magnitude(low, f"{name}.dora_lora")
        delta = self._step(product, "dora_scaled", self.around)
        tape.drop(product.storage)
        total = self._sum(share, delta, "dora_delta", leaves_module=True)
        tape.drop(share.storage, delta.storage)
        tape.drop(scaled.storage, *measured, low.storage)
        tape.mark("post", name)
        y = self._sum(base, total, "dora_total")
        tape.drop(total.storage, base.storage)
        if self.around == FP32:  # result.to(torch_result_dtype)
            wide_y, y = y, Value(tape.new(f"{name}.dora_result", self.outputs * BF16, "activations"), True)
            tape.node(y, [], lambda grad: self._give(wide_y, "grad_dora_total", self.outputs * FP32))
            tape.drop(wide_y.storage)
        if wide is not x:
            tape.drop(wide.storage)
        self.ops.keep_weight_casts(*casts)
        return y

    def _widened(self, x: Value) -> Value:
        """_cast_input_dtype: x in the adapter's dtype."""
        if x.storage.size_bytes == self.inputs * self.around:
            return x
        wide = Value(self.tape.new(f"{self.name}.lora_wide", self.inputs * FP32, "activations"), x.needs_grad)
        self.tape.node(wide, [], lambda grad: self._give(x, "grad_lora_down", self.inputs * BF16))
        return wide

    def _weight_casts(self) -> list[Storage]:
        if not self.spec.autocast:
            return []
        linear, rank = self.linear, self.lora.rank
        return [self.ops.weight_cast(f"{self.name}.lora_A", rank * linear.in_features),
                self.ops.weight_cast(f"{self.name}.lora_B", rank * linear.out_features)]  # fmt: skip

    def _measured_weight(self) -> list[Storage]:
        """get_weight_norm of weight + scaling * lora_B(lora_A(eye)).T; what stays until forward returns."""
        tape, name, linear = self.tape, self.name, self.linear
        weights = linear.in_features * linear.out_features
        square = linear.in_features**2
        kept = [tape.new(f"{name}.eye", square * self.around, "workspace")]
        eye = tape.new(f"{name}.eye_cast", square * self.width if self.width != self.around else 0, "workspace")
        self._hooks("lora_A")
        a = tape.new(f"{name}.eye_a", linear.in_features * self.lora.rank * self.width, "workspace")
        if tape.grad:  # the graph that lora_B's output holds, though nothing comes back through it
            kept += [eye, a]
        else:
            tape.drop(eye)
        self._hooks("lora_B")
        kept.append(tape.new(f"{name}.lora_weight", weights * self.width, "workspace"))
        if not tape.grad:
            tape.drop(a)
        if self.around != BF16:
            kept.append(tape.new(f"{name}.weight_fp32", weights * FP32, "workspace"))
        scaled = tape.new(f"{name}.lora_weight_scaled", weights * self.width, "workspace")
        adapted = tape.new(f"{name}.adapted_weight", weights * self.around, "workspace")
        tape.drop(scaled, adapted)
        return kept

    def _lora(self, wide: Value) -> Value:
        """lora_B(lora_A(x)), held."""
        tape, name, linear, rank = self.tape, self.name, self.linear, self.lora.rank
        source = wide
        if self.width != self.around:  # autocast
            source = Value(tape.new(f"{name}.lora_in", self.inputs * BF16, "activations"), wide.needs_grad)
            tape.node(source, [], lambda grad: self._give(wide, "grad_lora_wide", self.inputs * FP32))
        self._hooks("lora_A")
        a = Value(tape.new(f"{name}.lora_a", self.spec.tokens * rank * self.width, "activations"), True)

        def a_backward(grad: Storage) -> None:
            tape.mark("pre_backward", f"{name}.lora_A")
            self.ops.adapter_gradient(f"{name}.lora_A", rank * linear.in_features, self.lora)
            self._give(source, "grad_lora_in", self.inputs * self.width, view=True)
            tape.mark("post_backward", f"{name}.lora_A")
            tape.mark("post_backward", name)

        tape.node(a, [source.storage], a_backward)
        if source is not wide:
            tape.drop(source.storage)
        self._hooks("lora_B")
        b = Value(tape.new(f"{name}.lora_b", self.outputs * self.width, "activations"), True)

        def b_backward(grad: Storage) -> None:
            tape.mark("pre_backward", f"{name}.lora_B")
            self.ops.adapter_gradient(f"{name}.lora_B", rank * linear.out_features, self.lora)
            self._give(a, "grad_a", self.spec.tokens * rank * self.width)
            tape.mark("post_backward", f"{name}.lora_B")

        tape.node(b, [a.storage], b_backward)
        tape.drop(a.storage)
        return b

    def _without_bias(self, base: Value) -> Value:
        """base_result - bias, or the result itself, held once more."""
        tape = self.tape
        if not self.linear.bias:
            tape.hold(base.storage)
            return base
        value = Value(tape.new(f"{self.name}.dora_unbiased", self.outputs * BF16, "activations"), base.needs_grad)
        tape.node(value, [], lambda grad: tape.give(base, tape.hold(grad)))
        return value

    def _times_magnitude(self, value: Value, tag: str) -> Value:
        """A vector over the outputs times `value`; backward makes both products whole, then sums one of them up."""
        tape = self.tape
        result = Value(tape.new(tag, self.outputs * self.around, "activations"), True)
        value_bytes = value.storage.size_bytes

        def backward(grad: Storage) -> None:
            of_magnitude = tape.new(f"{tag}.grad_magnitude", self.outputs * self.around, "activation_grads")
            gradient = None
            if value.needs_grad:
                gradient = tape.new(f"{tag}.grad_in", self.outputs * self.around, "activation_grads")
            tape.drop(of_magnitude)
            if gradient is not None and value_bytes != gradient.size_bytes:
                narrow = tape.new(f"{tag}.grad_narrow", value_bytes, "activation_grads")
                tape.drop(gradient)
                gradient = narrow
            if gradient is not None:
                tape.give(value, gradient)

        tape.node(result, [value.storage], backward)
        return result

    def _step(self, value: Value, tag: str, element_bytes: int) -> Value:
        """`value` times a number."""
        result = Value(self.tape.new(f"{self.name}.{tag}", self.outputs * element_bytes, "activations"), True)
        self.tape.node(result, [], lambda grad: self._give(value, f"grad_{tag}", self.outputs * element_bytes))
        return result

    def _sum(self, one: Value, other: Value, tag: str, leaves_module: bool = False) -> Value:
        """Both get the gradient, a bf16 one a copy of it in bf16."""
        tape = self.tape
        result = Value(tape.new(f"{self.name}.{tag}", self.outputs * self.around, "activations"), True)
        sizes = {id(value): value.storage.size_bytes for value in (one, other)}

        def backward(grad: Storage) -> None:
            if leaves_module:
                tape.mark("pre_backward", self.name)
                self.ops.weight_gradient(
                    f"{self.name}.lora_magnitude", self.linear.out_features, self.lora.adapter_bytes, computed_wide=True
                )
            for value in (one, other):
                if sizes[id(value)] == grad.size_bytes:
                    tape.give(value, tape.hold(grad))
                else:
                    self._give(value, f"grad_{tag}_bf16", sizes[id(value)])

        tape.node(result, [], backward)
        return result

    def _hooks(self, adapter: str) -> None:
        self.tape.mark("pre", f"{self.name}.{adapter}")
        self.tape.mark("post", f"{self.name}.{adapter}")

    def _give(self, value: Value, tag: str, size_bytes: int, view: bool = False) -> None:
        if not value.needs_grad:
            return
        gradient = self.tape.new(f"{self.name}.{tag}", size_bytes, "activation_grads")
        gradient.view = view
        self.tape.give(value, gradient)
