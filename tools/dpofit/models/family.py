"""How the decoder layers of each model_type differ from Llama's, as transformers 5.5.4 and Liger 0.8.5 write them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults are Llama's: models/llama/modeling_llama.py."""

    fused_qkv: bool = False  # one projection makes q, k and v
    fused_gate_up: bool = False
    joins_heads: bool = False  # rotated and passed-through parts of each head are concatenated, even where none passes
    residual_dropout: bool = False  # a module before each sum
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # of hidden states, in the layer's order
    norms_outputs: bool = False  # attention's and the MLP's outputs go through a norm of their own, norms[1] and [3]
    gemma: bool = False  # norms multiply by 1 + weight in fp32; embeddings are scaled
    full_attention_every: int = 0  # so many layers, where the others attend in a window: the model makes two masks
    rotary_of_each_kind: bool = False  # and rotary tables for each kind of its layers
    liger: bool = True  # llamafactory 0.9.5 model_utils/liger_kernel.py finds kernels that patch this architecture
    liger_rotary: bool = True
    liger_norms_in_place: bool = True  # the backward of Liger's RMSNorm writes over the gradient it gets


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen": Family(fused_qkv=True, liger=False),  # Qwen 1, from its own repository
    "phi3": Family(fused_qkv=True, fused_gate_up=True, joins_heads=True, residual_dropout=True),
    "gemma2": Family(
        norms=_GEMMA_NORMS, norms_outputs=True, gemma=True, full_attention_every=2, liger_norms_in_place=False
    ),
    "gemma3_text": Family(
        norms=_GEMMA_NORMS, norms_outputs=True, gemma=True, full_attention_every=6, rotary_of_each_kind=True,
        liger_norms_in_place=False,
    ),
    # LLaMA-Factory applies Liger's kernels for glm4 to glm too, where they patch classes that nothing uses
    "glm": Family(fused_gate_up=True, joins_heads=True, liger=False),
    "glm4": Family(
        fused_gate_up=True, joins_heads=True, norms=_GLM4_NORMS, norms_outputs=True, liger_rotary=False,
        liger_norms_in_place=False,
    ),
}  # fmt: skip
