"""The parallel backbone of a drafter: context injection and bidirectional blocks.

The same functions serve training, with A blocks per sequence, and decoding, with A = 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import DrafterLayer, DrafterWeights
from dspark_jax.models.layers import linear, rms_norm, rope_phases, rotate
from pallas_kernels.row_linear import linear_add, rms_linear

ContextKV = tuple[tuple[Float[Array, "B N K E"], Float[Array, "B N K E"]], ...]


def context_features(
    config: DrafterConfig, weights: DrafterWeights, taps: Float[Array, "... nDt"]
) -> Float[Array, "... D"]:
    """Concatenated target layer outputs to the features that every draft layer reads."""
    projected = linear(taps.astype(weights.fc.dtype), weights.fc)
    return rms_norm(projected, weights.hidden_norm, config.rms_norm_eps)


def context_rows(
    config: DrafterConfig,
    weights: DrafterWeights,
    features: Float[Array, "... D"],
    position: Int[Array, "..."],
) -> tuple[tuple[Float[Array, "... N E"], Float[Array, "... N E"]], ...]:
    """Keys (normed and rotated) and values of context rows, one pair a layer.

    RoPE is computed for any position: ``max_position_embeddings`` is not a limit here.
    """
    phases = phases_at(config, position)
    return tuple(
        _keys_values(config, layer, linear(features, layer.kv), phases) for layer in weights.layers
    )


def context_kv(
    config: DrafterConfig,
    weights: DrafterWeights,
    features: Float[Array, "B K D"],
    position: Int[Array, "B K"],
) -> ContextKV:
    """Keys and values of whole sequences, in the layout blocks attend to."""
    rows = context_rows(config, weights, features, position)
    return tuple((jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)) for keys, values in rows)


def block_hidden_from_context(
    config: DrafterConfig,
    weights: DrafterWeights,
    block_embeddings: Float[Array, "B A G D"],
    context: ContextKV,
    start: Int[Array, "B A"],
    attend: Callable[..., Array] | None = None,
) -> Float[Array, "B A G D"]:
    """Final-normed hidden states of A blocks per sequence.

    Block a of sequence b sits at positions ``start[b, a] ..`` and sees the sequence's context
    rows before ``start[b, a]`` and all of itself, in both directions; never another block.
    A configured sliding window leaves only the last ``sliding_window`` of those context rows.
    ``attend`` computes the attention of one layer; training brings one for many blocks.
    """
    attend = attend or _attend
    x = block_embeddings.astype(weights.fc.dtype)
    position = start[..., None] + jnp.arange(x.shape[2], dtype=start.dtype)
    phases = phases_at(config, position)
    rows = context[0][0].shape[2]
    visible = _visible(config, start, rows)
    for layer, cached in zip(weights.layers, context, strict=True):
        x = _layer(layer, x, cached, phases, visible, config=config, attend=attend)
    return rms_norm(x, weights.norm, config.rms_norm_eps)


# jitted so that layers of one shape are traced and lowered once; XLA sees them unrolled
@functools.partial(jax.jit, static_argnames=("config", "attend"))
def _layer(
    layer: DrafterLayer,
    x: Float[Array, "B A G D"],
    context: tuple[Float[Array, "B N K E"], Float[Array, "B N K E"]],
    phases: tuple[Array, Array],
    visible: Bool[Array, "B A K"],
    *,
    config: DrafterConfig,
    attend: Callable[..., Array],
) -> Float[Array, "B A G D"]:
    """One draft layer over the blocks."""
    eps = config.rms_norm_eps
    query = rms_linear(x, layer.input_norm, layer.q, eps=eps)
    query = query.reshape(*x.shape[:3], -1, config.head_dim)
    query = rotate(rms_norm(query, layer.q_norm, eps), *phases)
    own = _keys_values(config, layer, rms_linear(x, layer.input_norm, layer.kv, eps=eps), phases)
    x = linear_add(attend(query, *context, *own, visible), layer.out, x)
    gated = rms_linear(x, layer.post_norm, layer.gate_up, eps=eps, gated=True)
    return linear_add(gated, layer.down, x)


def phases_at(
    config: DrafterConfig, position: Int[Array, "..."]
) -> tuple[Float[Array, "... E/2"], Float[Array, "... E/2"]]:
    """Rotary phases of any position: ``max_position_embeddings`` is not a limit here."""
    return rope_phases(position, config.head_dim, config.rope_theta, config.rope_scaling)


def _keys_values(
    config: DrafterConfig,
    layer: DrafterLayer,
    both: Float[Array, "... 2NE"],
    phases: tuple[Array, Array],
) -> tuple[Float[Array, "... N E"], Float[Array, "... N E"]]:
    """Keys (normed and rotated) and values from one product of both."""
    both = both.reshape(*both.shape[:-1], 2 * config.num_key_value_heads, config.head_dim)
    keys, values = jnp.split(both, 2, axis=-2)
    return rotate(rms_norm(keys, layer.k_norm, config.rms_norm_eps), *phases), values


def _visible(config: DrafterConfig, start: Int[Array, "B A"], rows: int) -> Bool[Array, "B A K"]:
    """Which context rows a block sees; the window counts from the block's anchor."""
    row = jnp.arange(rows, dtype=start.dtype)
    visible = row < start[..., None]
    if config.sliding_window is not None:
        visible &= row >= start[..., None] - config.sliding_window
    return visible


def _attend(
    query: Float[Array, "B A G H E"],
    context_keys: Float[Array, "B N K E"],
    context_values: Float[Array, "B N K E"],
    block_keys: Float[Array, "B A G N E"],
    block_values: Float[Array, "B A G N E"],
    visible: Bool[Array, "B A K"],
) -> Float[Array, "B A G H*E"]:
    """One fp32 softmax over the scores of two key sets that are never concatenated.

    Query heads fold into the rows of their key head, so that keys and values are not repeated.
    """
    batch, blocks, width, heads, head_dim = query.shape
    kv_heads = context_keys.shape[1]
    group = width * (heads // kv_heads)
    # Batch dimensions in front, so that every product is a plain batch of matrices.
    rows = query.reshape(batch, blocks, width, kv_heads, heads // kv_heads, head_dim)
    rows = rows.transpose(0, 3, 1, 2, 4, 5).reshape(batch, kv_heads, blocks * group, head_dim)
    own_rows = rows.reshape(batch * kv_heads * blocks, group, head_dim)
    own_keys = block_keys.transpose(0, 3, 1, 2, 4).reshape(-1, width, head_dim)
    own_values = block_values.transpose(0, 3, 1, 2, 4).reshape(-1, width, head_dim)

    per_block = (batch, kv_heads, blocks, group)
    context_scores = _scores("bnqe,bnke->bnqk", rows, context_keys).reshape(*per_block, -1)
    block_scores = _scores("bqe,bce->bqc", own_rows, own_keys).reshape(*per_block, width)
    context_scores = jnp.where(visible[:, None, :, None], context_scores, -jnp.inf)
    # Every row sees its own block, so the maximum is finite even without context.
    highest = jnp.maximum(
        jnp.max(context_scores, axis=-1, keepdims=True, initial=-jnp.inf),
        jnp.max(block_scores, axis=-1, keepdims=True),
    )
    highest = jax.lax.stop_gradient(highest)
    context_weight = jnp.exp(context_scores - highest)
    block_weight = jnp.exp(block_scores - highest)
    total = context_weight.sum(-1, keepdims=True) + block_weight.sum(-1, keepdims=True)
    context_weight = (context_weight / total).reshape(batch, kv_heads, blocks * group, -1)
    block_weight = (block_weight / total).reshape(-1, group, width)
    mixed = _mix("bnqk,bnke->bnqe", context_weight, context_values).reshape(*per_block, head_dim)
    mixed = mixed + _mix("bqc,bce->bqe", block_weight, own_values).reshape(mixed.shape)
    mixed = mixed.reshape(batch, kv_heads, blocks, width, heads // kv_heads, head_dim)
    mixed = mixed.transpose(0, 2, 3, 1, 4, 5).astype(query.dtype)
    return mixed.reshape(batch, blocks, width, heads * head_dim)


def _scores(pattern: str, query: Array, keys: Array) -> Array:
    scores = jnp.einsum(pattern, query, keys, preferred_element_type=jnp.float32)
    return scores * (query.shape[-1] ** -0.5)


def _mix(pattern: str, weight: Array, values: Array) -> Array:
    return jnp.einsum(
        pattern, weight.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
