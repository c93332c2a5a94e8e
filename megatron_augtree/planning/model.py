"""What one row and one (query, key) pair of a model cost: floating-point operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, as one rank holds it.

    Attributes:
        layers, hidden, ffn, vocab: sizes; `ffn` is the width of the MLP's inner layer.
        q_heads, kv_heads: query heads and KV heads.
        k_dim, v_dim: width of a key (and query) head and of a value head.
        gated: the MLP has a gate (SwiGLU).
        item_bytes: bytes of an activation element on the wire (2 bf16, 4 fp32, 8 fp64).
        accum_bytes: bytes of a partial result or gradient on the wire (4, or 8 in fp64 runs).
        row_parts: ranks over which sequence parallelism cuts the rows of norms and residuals.
        recomputed: layers that keep their input only and run again in the backward.
        attention_kept: those of them that keep what attention gave, too.
        logit_rows: rows whose logits are made at once; 0: all scored rows of a pass.
        stages: pipeline stages that the layers are cut into.
        can_recompute, can_offload: whether a pass may say so for itself (``mcore/recompute.py``).
    """

    layers: int
    hidden: int
    ffn: int
    vocab: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    gated: bool = False
    item_bytes: int = 4
    accum_bytes: int = 4
    row_parts: int = 1
    recomputed: int = 0
    attention_kept: int = 0
    logit_rows: int = 0
    stages: int = 1
    can_recompute: bool = True
    can_offload: bool = True

    @property
    def linear_flops(self) -> int:
        """Forward operations of the linear layers for one row in one layer."""
        qkv = self.hidden * (self.q_heads * self.k_dim + self.kv_heads * (self.k_dim + self.v_dim))
        proj = self.q_heads * self.v_dim * self.hidden
        mlp = self.hidden * self.ffn * (3 if self.gated else 2)
        return 2 * (qkv + proj + mlp)

    @property
    def pair_flops(self) -> int:
        """Forward operations of attention for one (query row, key row) pair in one layer."""
        return 2 * self.q_heads * (self.k_dim + self.v_dim)

    @property
    def vocab_flops(self) -> int:
        """Forward operations of the vocabulary projection for one scored row."""
        return 2 * self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one row in one layer."""
        return self.kv_heads * (self.k_dim + self.v_dim) * self.item_bytes

    @property
    def saved_bytes(self) -> int:
        """Activations that one row keeps for the backward of one layer, without recompute.

        Counted with torch's saved-tensor hooks on megatron-core's own layers, GELU with LayerNorm and SwiGLU
        with RMSNorm: norms and their inputs, residuals, QKV output, rotated q and k, attention output and its
        log-sum-exp, the MLP's inner activations. Within 4 % of both.
        """
        qkv = self.q_heads * self.k_dim + self.kv_heads * (self.k_dim + self.v_dim)
        hidden = self.hidden // self.row_parts
        wide = 8 * hidden + 5 * self.ffn if self.gated else 6 * hidden + 2 * self.ffn
        return (wide + 2 * qkv) * self.item_bytes + self.attended_bytes

    @property
    def attended_bytes(self) -> int:
        """What attention gave one row in one layer: its output and its log-sum-exp."""
        return self.q_heads * (self.v_dim + 1) * self.accum_bytes

    @property
    def input_bytes(self) -> int:
        """A row's input of one layer: what a recomputed layer keeps."""
        return self.hidden // self.row_parts * self.item_bytes
