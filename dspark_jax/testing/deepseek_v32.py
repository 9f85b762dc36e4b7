"""A DeepSeek-V3.2 small enough for tests: an MLP layer and one with experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from dspark_jax.models.deepseek_v32.config import DeepseekV32Config

TOY = DeepseekV32Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=6,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.5,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=64,
)


def toy_config(**changes: Any) -> DeepseekV32Config:
    """The toy, with other fields where asked."""
    return dataclasses.replace(TOY, **changes)
