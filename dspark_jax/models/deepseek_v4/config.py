"""Static description of a DeepSeek-V4 decoder."""

from __future__ import annotations

import dataclasses
from types import ModuleType

from dspark_jax.models.deepseek_rope import Yarn

OVERLAPPING_RATIO = 4
"""Layers of this ratio pool overlapping windows and choose entries by an indexer (CSA)."""


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config:
    """Shapes and constants of a DeepSeek-V4 decoder; hashable. Names are DeepSeek's.

    Attributes:
        head_dim: width E of a query head and of the one vector that is key and value of all
            heads; its last ``qk_rope_head_dim`` numbers carry the position.
        compress_ratios: one a layer: tokens that a compressed entry stands for. 0 has none
            (window attention alone), 4 is CSA, anything else HCA.
        sliding_window: raw rows a token attends to in every layer, itself included.
        index_topk: entries that the indexer of a CSA layer chooses for each token.
        num_hash_layers: first layers, whose experts follow from the token id.
        hc_mult: residual streams.
        compress_rope_theta: RoPE base of layers with a ratio, rescaled by ``compress_yarn``;
            layers without one use ``rope_theta`` as it is.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    compress_ratios: tuple[int, ...]
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    compress_yarn: Yarn | None
    max_position_embeddings: int

    model_type = "deepseek_v4"

    @property
    def family(self) -> ModuleType:
        """The module that implements the target protocol (``models/protocol.py``)."""
        from dspark_jax.models.deepseek_v4 import model

        return model

    @property
    def verify_rows(self) -> int:
        """Most rows a request may have in a batch that may be rejected (``ring``)."""
        from dspark_jax.models.deepseek_v4 import ring

        return ring.SCRATCH
