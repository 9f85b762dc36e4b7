"""Experts of DeepSeek-V4: routed by score or by a table over token ids, and a shared one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.weights import Moe
from dspark_jax.models.experts import choose_experts, expert, routed_experts, weigh_experts
from dspark_jax.models.layers import linear


def moe(
    config: DeepseekV4Config,
    weights: Moe,
    x: Float[Array, "T D"],
    tokens: Int[Array, "T"],
    real: Bool[Array, "T"],
) -> Float[Array, "T D"]:
    """The experts of each token and the shared one, all with clipped gates (``swiglu_limit``).

    DeepSeek's code clips the shared expert as well; transformers does not.

    Args:
        x: normed input.
        tokens: ids, which hash layers route by.
        real: rows that are no padding; the others are sent to no expert.
    """
    with jax.named_scope("experts"):
        ids, weight = route(config, weights, x, tokens)
        ids = jnp.where(real[:, None], ids, -1)
        limit = config.swiglu_limit
        routed = routed_experts(x, ids, weight, weights.experts, limit=limit)
        return routed + expert(x, weights.shared_gate_up, weights.shared_down, limit)


def route(
    config: DeepseekV4Config, weights: Moe, x: Float[Array, "T D"], tokens: Int[Array, "T"]
) -> tuple[Int[Array, "T c"], Float[Array, "T c"]]:
    """Experts of each token and their weights: sqrt(softplus) of fp32 scores, normalised.

    An expert that a hash layer's table names twice for a token has two of the shares of 1.
    """
    scores = jnp.sqrt(jax.nn.softplus(linear(x.astype(jnp.float32), weights.router)))
    if weights.expert_of_token is not None:
        ids = weights.expert_of_token[tokens]
    else:
        assert weights.bias is not None
        ids = choose_experts(scores, weights.bias, config.num_experts_per_tok)
    return ids, weigh_experts(scores, ids, config.routed_scaling_factor)
