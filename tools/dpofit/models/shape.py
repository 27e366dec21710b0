"""The shape of a dense decoder: every number the memory model needs, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass


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
    model_type: str  # transformers' model_type: qwen (1), qwen2, qwen3, llama, mistral
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied_embeddings: bool
    linears: tuple[Linear, ...]  # of one layer, in forward order
    qk_norm: bool = False  # Qwen 3: RMSNorm over head_dim on q and k
    sliding_window: int | None = None
    max_positions: int = 32768
    source: str = ""  # where the numbers come from: public config.json, or the file read

    @property
    def norms(self) -> tuple[tuple[str, int], ...]:
        """(name, width) of one layer's RMSNorms."""
        found = [("input_layernorm", self.hidden_size), ("post_attention_layernorm", self.hidden_size)]
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
