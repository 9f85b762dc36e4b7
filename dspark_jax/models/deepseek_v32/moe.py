"""The feed-forward half of a layer: one MLP, or routed experts and a shared one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.deepseek_v32.weights import Mlp, Moe
from dspark_jax.models.experts import choose_experts, expert, routed_experts, weigh_experts
from dspark_jax.models.layers import linear


def feed_forward(
    config: DeepseekV32Config,
    weights: Mlp | Moe,
    x: Float[Array, "T D"],
    position: Int[Array, "T"],
) -> Float[Array, "T D"]:
    """The MLP or the experts of a layer; padding rows (position -1) are sent to no expert."""
    if isinstance(weights, Mlp):
        return expert(x, weights.gate_up, weights.down)
    ids, weight = route(config, weights, x)
    ids = jnp.where(position[:, None] >= 0, ids, -1)
    routed = routed_experts(x, ids, weight, weights.experts)
    return routed + expert(x, weights.shared.gate_up, weights.shared.down)


def route(
    config: DeepseekV32Config, weights: Moe, x: Float[Array, "T D"]
) -> tuple[Int[Array, "T c"], Float[Array, "T c"]]:
    """Experts of each token and their weights, from fp32 sigmoid scores.

    The bias, which balanced the load in training, chooses and does not weigh (DeepSeek-V3
    report, equations 12 to 16).
    """
    scores = jax.nn.sigmoid(linear(x.astype(jnp.float32), weights.router))
    ids = choose_experts(
        scores,
        weights.bias,
        config.num_experts_per_tok,
        groups=config.n_group,
        kept_groups=config.topk_group,
    )
    return ids, weigh_experts(scores, ids, config.routed_scaling_factor)
