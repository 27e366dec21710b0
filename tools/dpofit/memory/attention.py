"""Rotary positions and attention on the tape: flash, memory-efficient with a mask, eager.

Sources: transformers 5.5.4 models/qwen2/modeling_qwen2.py, integrations/sdpa_attention.py; liger-kernel 0.8.5
ops/rope.py; the attention kernels as cited. Sizes are bytes.
"""

from __future__ import annotations

from dpofit.memory.shared import shared_attention
from dpofit.memory.softcap import capped, capped_backward
from dpofit.memory.spec import BF16, FP32, LayerSpec
from dpofit.memory.tape import Storage, Tape, Value


class AttentionOps:
    """Attention operators, writing to one tape."""

    def __init__(self, spec: LayerSpec, tape: Tape) -> None:
        self.spec, self.tape = spec, tape
        self.returned_weights: Storage | None = None  # eager attention returns them: the decoder layer's to let go of

    def rope(self, q: Value, k: Value) -> tuple[Value, Value]:
        """Rotary positions: q*cos + rotate_half(q)*sin out of place; Liger rotates in place."""
        spec, tape = self.spec, self.tape
        if spec.liger and spec.model.family.liger_rotary:
            return self._liger_rope(q, k) if spec.model.family.fused_qkv else (q, k)
        factor = spec.residual_bytes // BF16  # cos and sin have the hidden states' dtype
        out = []
        for name, x, whole in (("q", q, spec.query), ("k", k, spec.key)):
            size = whole // spec.model.head_dim * (spec.model.rotary_dim or spec.model.head_dim)
            joins = spec.model.family.joins_heads
            product = tape.new(f"rope.{name}.cos", size * factor, "workspace")
            negated = tape.new(f"rope.{name}.neg", size // 2, "workspace")
            rotated = tape.new(f"rope.{name}.rotated", size, "workspace")
            tape.drop(negated)
            sine = tape.new(f"rope.{name}.sin", size * factor, "workspace")
            tape.drop(rotated)
            y = Value(tape.new(f"rope.{name}.out", size * factor, "activations"), x.needs_grad)
            tape.drop(product, sine)
            if joins:  # with the part that is passed through, which may be none
                joined = tape.new(f"rope.{name}.cat", whole * factor, "activations")
                tape.drop(y.storage)
                y.storage = joined
            if factor == 2:  # autocast brings q and k back to bf16 for the attention kernel
                narrow = tape.new(f"rope.{name}.bf16", whole, "activations")
                tape.drop(y.storage)
                y.storage = narrow

            def backward(grad: Storage, x: Value = x, size: int = size, whole: int = whole, name: str = name) -> None:
                sine_grad = tape.new(f"rope.{name}.grad_sin", size * factor, "workspace")
                half = tape.new(f"rope.{name}.grad_half", size * factor, "workspace")
                tape.drop(sine_grad)
                cosine_grad = tape.new(f"rope.{name}.grad_cos", size * factor, "activation_grads")
                tape.drop(half)
                if factor == 2:
                    narrow = tape.new(f"rope.{name}.grad_bf16", size, "activation_grads")
                    tape.drop(cosine_grad)
                    cosine_grad = narrow
                if size < whole:  # slices of each head: zeros of the whole, and the gradient in its place
                    spread = tape.new(f"rope.{name}.grad_heads", whole, "activation_grads")
                    tape.drop(cosine_grad)
                    cosine_grad = spread
                tape.give(x, cosine_grad)

            tape.node(y, [], backward)
            out.append(y)
        tape.drop(q.storage, k.storage)  # query_states and key_states are rebound when the function returns
        return out[0], out[1]

    def _liger_rope(self, q: Value, k: Value) -> tuple[Value, Value]:
        """liger ops/rope.py wants q and k contiguous: slices of a larger projection are copied, forward and back."""
        spec, tape = self.spec, self.tape
        copies = [tape.new(f"rope.{name}", size, "activations") for name, size in (("q", spec.query), ("k", spec.key))]
        rotated = Value(copies[0], q.needs_grad), Value(copies[1], k.needs_grad)
        for x, y in zip((q, k), rotated, strict=True):

            def backward(grad: Storage, x: Value = x) -> None:
                tape.give(x, tape.hold(grad))

            tape.node(y, [], backward)
        tape.drop(q.storage, k.storage)
        return rotated

    def attention(self, q: Value, k: Value, v: Value, mask: Storage | None) -> Value:
        kind = self.spec.attention
        if self.spec.shared is not None:
            return shared_attention(self.spec, self.tape, self.spec.shared, q, k, v)
        if kind == "eager":
            return self._eager_attention(q, k, v)
        if kind == "efficient":
            return self._efficient_attention(q, k, v, mask)
        return self._flash_attention(q, k, v)

    def _flash_attention(self, q: Value, k: Value, v: Value) -> Value:
        """FlashAttention-2 (flash_attn_interface.py, csrc/flash_attn/flash_api.cpp mha_bwd): saves q, k, v, out and
        fp32 log-sum-exp; backward has an fp32 dq accumulator and, with grouped heads, per-head dk and dv."""
        spec, tape, model = self.spec, self.tape, self.spec.model
        grouped = model.kv_heads != model.heads
        if spec.attention == "flash_varlen":  # padding: _upad_input copies q, k, v without the padding
            for name, x in (("q", q), ("k", k), ("v", v)):
                packed = tape.new(f"attention.unpad_{name}", x.storage.size_bytes, "activations")
                tape.drop(x.storage)
                x.storage = packed
        out = Value(tape.new("attention.out", spec.query, "activations"), _any_needs_grad(q, k, v))
        lse = tape.new("attention.lse", spec.tokens * model.heads * FP32, "activations")
        kernel_out = tape.hold(out.storage)

        def backward(grad: Storage) -> None:
            unpadded = (
                tape.new("attention.grad_unpad", spec.query, "activation_grads")
                if spec.attention == "flash_varlen"
                else None
            )
            dq = tape.new("attention.dq", spec.query, "activation_grads")
            dk = tape.new("attention.dk", spec.key, "activation_grads")
            dv = tape.new("attention.dv", spec.key, "activation_grads")
            softmax_d = tape.new("attention.softmax_d", spec.tokens * model.heads * FP32, "workspace")
            rounded = -(-spec.tokens_per_row // 128) * 128  # flash_api.cpp seqlen_q_rounded
            dq_accum = tape.new("attention.dq_accum", spec.query // spec.tokens_per_row * rounded * 2, "workspace")
            expanded = tape.new("attention.dkv_expanded", 2 * spec.query if grouped else 0, "workspace")
            tape.drop(softmax_d, dq_accum, expanded, unpadded)
            tape.give(q, dq)
            tape.give(k, dk)
            tape.give(v, dv)

        tape.node(out, [q.storage, k.storage, v.storage, kernel_out, lse], backward)
        if spec.attention == "flash_varlen":  # pad_input writes a padded copy; the kernel's own output stays saved
            out.storage = tape.new("attention.padded", spec.query, "activations")
            tape.drop(kernel_out)
        tape.drop(kernel_out, lse, q.storage, k.storage, v.storage)
        return out

    def _efficient_attention(self, q: Value, k: Value, v: Value, mask: Storage | None) -> Value:
        """SDPA with a mask: K and V repeated to all heads (sdpa_attention.py use_gqa_in_sdpa is false), the bool mask
        turned into a bf16 bias per call (ATen transformers/attention.cpp convert_boolean_attn_mask), then the
        memory-efficient kernel; its backward accumulates dq in fp32."""
        spec, tape, model = self.spec, self.tape, self.spec.model
        repeats = model.heads // model.kv_heads
        wide = []
        for name, x in (("k", k), ("v", v)):
            if repeats == 1:
                wide.append(x)
                continue
            # one head for all: reshape of an expanded tensor is a view
            alone = model.kv_heads == 1
            wide_x = tape.hold(x.storage) if alone else tape.new(f"attention.repeat_{name}", spec.query, "activations")
            y = Value(wide_x, x.needs_grad)

            def spread(grad: Storage, x: Value = x, name: str = name) -> None:
                tape.give(x, tape.new(f"attention.sum_{name}", spec.key, "activation_grads"))

            tape.node(y, [], spread)
            tape.drop(x.storage)
            wide.append(y)
        converted = mask is not None and not spec.packed
        bias = tape.new(
            "attention.bias", spec.rows * spec.tokens_per_row**2 * BF16 if converted else 0, "attention_mask"
        )
        if spec.tokens_per_row % 16 and mask:  # attention.cpp pad_bias: the last dimension to a multiple of 16
            aligned = -(-spec.tokens_per_row // 16) * 16
            padded = tape.new(
                "attention.bias_padded", spec.rows * spec.tokens_per_row * aligned * BF16, "attention_mask"
            )
            tape.drop(bias)
            bias = padded
        out = Value(tape.new("attention.out", spec.query, "activations"), _any_needs_grad(q, k, v))
        lse = tape.new("attention.lse", spec.tokens * model.heads * FP32, "activations")

        def backward(grad: Storage) -> None:
            grads = [tape.new(f"attention.d{name}", spec.query, "activation_grads") for name in "qkv"]
            delta = tape.new("attention.delta", spec.tokens * model.heads * FP32, "workspace")
            accumulator = tape.new("attention.dq_accum", spec.query * 2, "workspace")
            tape.drop(delta, accumulator)
            for value, gradient in zip((q, *wide), grads, strict=True):
                tape.give(value, gradient)

        tape.node(out, [q.storage, wide[0].storage, wide[1].storage, out.storage, lse, bias], backward)
        tape.drop(lse, bias, q.storage, wide[0].storage, wide[1].storage)
        return out

    def _eager_attention(self, q: Value, k: Value, v: Value) -> Value:
        """modeling_qwen2.py eager_attention_forward: scores, fp32 softmax and bf16 weights, all [rows, heads, T, T]."""
        spec, tape, model = self.spec, self.tape, self.spec.model
        scores = spec.rows * model.heads * spec.tokens_per_row**2
        copied = 1 < model.kv_heads < model.heads  # one head for all: reshape of an expanded tensor is a view
        wide_size = spec.query if copied else 0
        k_wide, v_wide = (tape.new(f"attention.repeat_{n}", wide_size, "activations") for n in "kv")
        raw = tape.new("attention.scores", scores * BF16, "attention_scores")
        scaled = tape.new("attention.scaled", scores * BF16, "attention_scores")
        tape.drop(raw)
        tanh: Storage | None = None
        if model.attention_softcap is not None:  # modeling_gemma2.py: divided, tanh, multiplied; tanh saves its result
            scaled, tanh = capped(tape, scaled, "attention_scores")
        masked = tape.new("attention.masked", scores * BF16, "attention_scores")
        tape.drop(scaled)
        wide = tape.new("attention.scores_fp32", scores * FP32, "attention_scores")
        softmax = tape.new("attention.softmax", scores * FP32, "attention_scores")
        tape.drop(wide)
        weights = tape.new("attention.weights", scores * BF16, "attention_scores")
        tape.drop(masked)
        self.returned_weights = tape.hold(weights)
        out = Value(tape.new("attention.out", spec.query, "activations"), _any_needs_grad(q, k, v))

        def backward(grad: Storage) -> None:
            dv = tape.new("attention.dv_wide", spec.query, "activation_grads")
            d_weights = tape.new("attention.d_weights", scores * BF16, "attention_scores")
            tape.give(v, tape.new("attention.dv", spec.key, "activation_grads"))
            tape.drop(dv, weights)
            d_softmax = tape.new("attention.d_softmax", scores * FP32, "attention_scores")
            tape.drop(d_weights)
            d_wide = tape.new("attention.d_scores_fp32", scores * FP32, "attention_scores")
            tape.drop(d_softmax)
            d_scores = tape.new("attention.d_scores", scores * BF16, "attention_scores")
            tape.drop(d_wide)
            if tanh is not None:
                d_scores = capped_backward(tape, d_scores, tanh, "attention_scores")
            d_scaled = tape.new("attention.d_scaled", scores * BF16, "attention_scores")
            tape.drop(d_scores)
            tape.give(q, tape.new("attention.dq", spec.query, "activation_grads"))
            tape.give(k, tape.new("attention.dk", spec.key, "activation_grads"))
            tape.drop(d_scaled)

        keys, values = (k_wide, v_wide) if copied else (k.storage, v.storage)
        tape.node(out, [q.storage, keys, values, softmax], backward)
        if not (tape.grad and out.needs_grad):
            tape.drop(weights, tanh)  # else dropped where backward's nodes let go of them
        tape.drop(k_wide, v_wide, softmax, q.storage, k.storage, v.storage)
        return out


def _any_needs_grad(*values: Value) -> bool:
    return any(value.needs_grad for value in values)
