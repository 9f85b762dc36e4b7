"""Dense decoders (Llama family, Qwen3) behind the target protocol."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.config import DenseConfig
from dspark_jax.models.layers import linear, rms_norm, rope_phases, rotate, swiglu
from dspark_jax.models.ragged import Packed
from dspark_jax.models.weights import DenseCache, DenseLayer, DenseWeights
from pallas_kernels.paged_attention import paged_attention


def init_cache(config: DenseConfig, slots: int, capacity: int, dtype: Any) -> DenseCache:
    """An empty cache for ``slots`` requests of ``capacity`` rows each."""
    shape = (slots, config.num_key_value_heads, capacity, config.head_dim)
    layers = range(config.num_hidden_layers)
    return DenseCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=jnp.zeros(slots, jnp.int32),
    )


def forward(
    config: DenseConfig,
    weights: DenseWeights,
    cache: DenseCache,
    packed: Packed,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "T D"], Float[Array, "T n*D"], DenseCache]:
    """Run packed rows through the decoder and write their cache rows.

    Args:
        packed: the query rows; their positions must continue what their slots hold.
        taps: layers whose output is wanted: -1 the embedding, i the residual stream after
            layer i, before any norm.

    Returns:
        Hidden states after the final norm, the taps side by side in the order asked, and the
        cache with the rows written and ``length`` unchanged. Padding rows hold finite values
        that mean nothing.

    Raises:
        ValueError: a tap outside -1..L-1.
    """
    for tap in taps:
        if not -1 <= tap < config.num_hidden_layers:
            raise ValueError(
                f"tap {tap} is no layer of this model: wanted -1 (embedding) to "
                f"{config.num_hidden_layers - 1}"
            )
    slot_count = cache.length.shape[0]
    slot = packed.slot_of_row(slot_count)
    real = (slot >= 0) & (slot < slot_count)
    position = packed.unpack(jnp.where(real, packed.position, -1), fill=-1)
    phases = rope_phases(packed.position, config.head_dim, config.rope_theta, config.rope_scaling)
    hidden = jnp.take(weights.embed, packed.tokens, axis=0)
    outputs = {-1: hidden} if -1 in taps else {}
    keys, values = list(cache.keys), list(cache.values)
    for index, layer in enumerate(weights.layers):
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        query, key, value = _project(config, layer, normed, phases)
        keys[index] = _write_rows(keys[index], key, slot, packed.position)
        values[index] = _write_rows(values[index], value, slot, packed.position)
        attended = packed.pack(
            paged_attention(
                packed.unpack(query), keys[index], values[index], position, packed.slots
            )
        )
        hidden = hidden + linear(attended.reshape(hidden.shape[0], -1), layer.out)
        normed = rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
        hidden = hidden + swiglu(normed, layer.gate_up, layer.down)
        if index in taps:
            outputs[index] = hidden
    tapped = (
        jnp.concatenate([outputs[tap] for tap in taps], axis=-1)
        if taps
        else jnp.zeros((hidden.shape[0], 0), hidden.dtype)
    )
    final = rms_norm(hidden, weights.norm, config.rms_norm_eps)
    return final, tapped, DenseCache(tuple(keys), tuple(values), cache.length)


def unembed(
    config: DenseConfig, weights: DenseWeights, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """fp32 logits of final hidden states."""
    return linear(hidden, weights.head, out_dtype=jnp.float32)


def commit(config: DenseConfig, cache: DenseCache, length: Int[Array, "S"]) -> DenseCache:
    """Set the committed length of every slot; rows past it become scratch."""
    return DenseCache(cache.keys, cache.values, length.astype(jnp.int32))


def output_embedding(weights: DenseWeights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its head (the embedding itself when tied)."""
    return weights.head


def input_embedding(weights: DenseWeights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its embedding."""
    return weights.embed


def _project(
    config: DenseConfig,
    layer: DenseLayer,
    normed: Float[Array, "T D"],
    phases: tuple[Float[Array, "T E/2"], Float[Array, "T E/2"]],
) -> tuple[Float[Array, "T H E"], Float[Array, "T N E"], Float[Array, "T N E"]]:
    """Query, key and value heads of one layer, normed where the family does so, then rotated."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    fused = linear(normed, layer.qkv).reshape(normed.shape[0], heads + 2 * groups, config.head_dim)
    query, key, value = jnp.split(fused, [heads, heads + groups], axis=1)
    if layer.q_norm is not None:
        query = rms_norm(query, layer.q_norm, config.rms_norm_eps)
    if layer.k_norm is not None:
        key = rms_norm(key, layer.k_norm, config.rms_norm_eps)
    cos, sin = phases
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def _write_rows(
    cache: Float[Array, "S N K E"],
    rows: Float[Array, "T N E"],
    slot: Int[Array, "T"],
    position: Int[Array, "T"],
) -> Float[Array, "S N K E"]:
    """Put rows at their slot and position; a slot or position out of range writes nothing."""
    written = cache.at[slot, :, position].set(
        rows.astype(cache.dtype), mode="drop", wrap_negative_indices=False
    )
    # XLA would repeat the write of a single row inside each of its readers, and copy the cache
    # so that it can
    return jax.lax.optimization_barrier(written)
