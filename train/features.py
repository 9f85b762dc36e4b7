"""What the frozen target tells the drafter: taps and final hidden states of whole sequences."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.config import DenseConfig
from dspark_jax.models.layers import linear, rms_norm, rope_phases, rotate, swiglu
from dspark_jax.models.weights import DenseLayer, DenseWeights
from train.fused_attention import attention


def target_features(
    config: DenseConfig,
    weights: DenseWeights,
    tokens: Int[Array, "B K"],
    taps: tuple[int, ...],
) -> tuple[Float[Array, "B K n*D"], Float[Array, "B K D"]]:
    """Causal forward of whole sequences from position 0, without a cache.

    Args:
        tokens: padding stands at the end, where no earlier position sees it.
        taps: -1 the embedding, i the residual stream after layer i.

    Returns:
        The taps side by side in the order asked, and the hidden states after the final norm,
        both in the dtype of the weights.
    """
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    phases = rope_phases(position, config.head_dim, config.rope_theta, config.rope_scaling)
    hidden = jnp.take(weights.embed, tokens, axis=0)
    outputs = {-1: hidden}
    for index, layer in enumerate(weights.layers):
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        hidden = hidden + linear(_attention(config, layer, normed, phases), layer.out)
        normed = rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
        hidden = hidden + swiglu(normed, layer.gate_up, layer.down)
        outputs[index] = hidden
    tapped = jnp.concatenate([outputs[tap] for tap in taps], axis=-1)
    return tapped, rms_norm(hidden, weights.norm, config.rms_norm_eps)


def _attention(
    config: DenseConfig,
    layer: DenseLayer,
    normed: Float[Array, "B K D"],
    phases: tuple[Float[Array, "1 K E/2"], Float[Array, "1 K E/2"]],
) -> Float[Array, "B K H*E"]:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    fused = linear(normed, layer.qkv)
    fused = fused.reshape(*normed.shape[:2], heads + 2 * groups, config.head_dim)
    query, key, value = jnp.split(fused, [heads, heads + groups], axis=2)
    if layer.q_norm is not None:
        query = rms_norm(query, layer.q_norm, config.rms_norm_eps)
    if layer.k_norm is not None:
        key = rms_norm(key, layer.k_norm, config.rms_norm_eps)
    mixed = attention(rotate(query, *phases), rotate(key, *phases), value, is_causal=True)
    return mixed.reshape(*normed.shape[:2], -1)
