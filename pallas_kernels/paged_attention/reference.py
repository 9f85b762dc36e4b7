"""Paged attention in pure JAX: what every kernel must compute, and the XLA implementation."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def paged_attention(
    query: Float[Array, "A W H E"],
    keys: Float[Array, "S N K E"],
    values: Float[Array, "S N K E"],
    position: Int[Array, "A W"],
    slots: Int[Array, "A"] | None,
) -> Float[Array, "A W H E"]:
    """Attention of each query row over the rows ``0..position`` of its request's slot.

    Same arguments and result as `pallas_kernels.paged_attention.paged_attention`. Scores,
    softmax and sums are fp32; the unnormalised weights are rounded to the cache's dtype for
    the product with ``values``, and the sum is divided in fp32.
    """
    requests, width, heads, head_dim = query.shape
    slot_count, kv_heads, capacity, _ = keys.shape
    group = heads // kv_heads
    if slots is None:
        limit = position
    else:
        present = (slots >= 0) & (slots < slot_count)
        limit = jnp.where(present[:, None], position, -1)
        slots = jnp.where(present, slots, 0)
        keys, values = keys[slots], values[slots]

    index = jnp.arange(capacity, dtype=jnp.int32)
    live = index <= limit.max(axis=1, keepdims=True)
    # A weight of zero does not silence a NaN, so rows nobody may read are zeroed themselves.
    values = jnp.where(live[:, None, :, None], values, 0)

    # Query rows of one key/value head together, so that both products are batches of matrices.
    rows = query.reshape(requests, width, kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(requests, kv_heads, width * group, head_dim)
    scores = jnp.einsum("anqe,anke->anqk", rows, keys, preferred_element_type=jnp.float32)
    scores = scores * (1 / math.sqrt(head_dim))
    visible = index <= jnp.repeat(limit, group, axis=1)[:, None, :, None]
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum(
        "anqk,anke->anqe", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    out = (out / jnp.where(total > 0, total, 1)).astype(query.dtype)
    out = out.reshape(requests, kv_heads, width, group, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(query.shape)
