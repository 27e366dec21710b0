"""The shape of a dense decoder: every number the memory model needs, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpofit.models.family import FAMILIES, Family


@dataclass(frozen=True, slots=True)
class Linear:
    """One weight matrix of a decoder layer, `[out_features, in_features]`, as transformers names it."""

    name: str  # q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; Qwen 1: c_attn, c_proj, w1, w2
    in_features: int
    out_features: int
    bias: bool

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features + (self.out_features if self.bias else 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder-only transformer with RMSNorm, rotary positions and a gated MLP."""

    name: str
    model_type: str  # transformers' model_type: a key of family.FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied_embeddings: bool
    linears: tuple[Linear, ...]  # of one layer, in forward order
    qk_norm: bool = False  # Qwen 3, Gemma 3: RMSNorm over head_dim on q and k
    rotary_dim: int = 0  # elements of each head that get rotary positions; 0: all
    attention_softcap: float | None = None  # Gemma 2: scores through tanh, between plus and minus this
    logit_softcap: float | None = None  # the same of the logits
    sliding_window: int | None = None
    max_positions: int = 32768
    source: str = ""  # where the numbers come from: public config.json, or the file read

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def kinds_of_attention(self) -> int:
        """Of layers that attend in a window and layers that attend to all, how many there are."""
        return 2 if 0 < self.family.full_attention_every <= self.layers else 1

    @property
    def architecture_keys(self) -> tuple[tuple[str, Any], ...]:
        """Keys of config.json that only some families have."""
        keys: list[tuple[str, Any]] = []
        if self.model_type in ("mistral", "phi3") or self.family.full_attention_every:
            keys.append(("sliding_window", self.sliding_window))
        if self.family.full_attention_every:
            keys += [
                ("attn_logit_softcapping", self.attention_softcap),
                ("final_logit_softcapping", self.logit_softcap),
            ]
        if self.family.joins_heads:
            share = (self.rotary_dim or self.head_dim) / self.head_dim
            keys.append(("partial_rotary_factor", share))
        if self.model_type in ("glm", "glm4"):
            keys.append(("attention_bias", self.linears[0].bias))
        return tuple(keys)

    @property
    def norms(self) -> tuple[tuple[str, int], ...]:
        """(name, width) of one layer's RMSNorms."""
        found = [(name, self.hidden_size) for name in self.family.norms]
        if self.qk_norm:
            found += [("q_norm", self.head_dim), ("k_norm", self.head_dim)]
        return tuple(found)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: linears and norms."""
        return sum(linear.parameters for linear in self.linears) + sum(width for _, width in self.norms)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters, a tied head counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden_size
