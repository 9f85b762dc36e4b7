"""What the frozen target tells the drafter: taps and final hidden states of whole sequences."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.models.config import DenseConfig
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.layers import linear, rms_norm, rope_phases, rotate, swiglu
from dspark_jax.models.weights import DenseLayer, DenseWeights
from train import features_deepseek_v4, features_deepseek_v32
from train.fused_attention import attention

SPARSE_FAMILIES: dict[type, ModuleType] = {
    DeepseekV4Config: features_deepseek_v4,
    DeepseekV32Config: features_deepseek_v32,
}
"""Modules whose ``sequence_forward`` runs whole sequences, by the target's kind of config."""


def check_sequences(target: LoadedTarget, remedy: str) -> None:
    """Refuse a target whose layers cannot be run over whole sequences.

    Raises:
        ValueError: names its config, what is wanted, and the ``remedy``.
    """
    kinds = (DenseConfig, *SPARSE_FAMILIES)
    if not isinstance(target.config, kinds):
        raise ValueError(
            f"{target.name} has a {type(target.config).__name__}, which has no forward of whole "
            f"sequences; wanted one of {', '.join(kind.__name__ for kind in kinds)}: {remedy}"
        )


def target_features(
    config: Any,
    weights: Any,
    tokens: Int[Array, "B K"],
    taps: tuple[int, ...],
) -> tuple[Float[Array, "B K n*D"], Float[Array, "B K D"]]:
    """Causal forward of whole sequences from position 0, without a cache.

    Args:
        tokens: padding stands at the end, where no earlier position sees it.
        taps: -1 the embedding, i the residual stream after layer i (DeepSeek-V4: the mean of its
            streams).

    Returns:
        The taps side by side in the order asked, and the hidden states after the final norm,
        both in the dtype of the weights.
    """
    if isinstance(config, DenseConfig):
        return _dense_features(config, weights, tokens, taps)
    real = jnp.ones(tokens.shape, bool)
    output = SPARSE_FAMILIES[type(config)].sequence_forward(config, weights, tokens, real, taps)
    return output.taps, output.last_hidden


def _dense_features(
    config: DenseConfig, weights: DenseWeights, tokens: Int[Array, "B K"], taps: tuple[int, ...]
) -> tuple[Float[Array, "B K n*D"], Float[Array, "B K D"]]:
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
