"""Paged attention in pure JAX: what every kernel must compute, and the XLA implementation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.jit
def rows_of(pool: Float[Array, "B N P E"], table: Int[Array, "A C"]) -> Float[Array, "A N CP E"]:
    """The pages of each request, joined; an absent page (negative) shows some other one."""
    page = jnp.maximum(table, 0)[:, None, :]
    head = jnp.arange(pool.shape[1], dtype=jnp.int32)[None, :, None]
    rows = pool[page, head]
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def paged_attention(
    query: Float[Array, "A W H E"],
    keys: Float[Array, "B N P E"],
    values: Float[Array, "B N P E"],
    position: Int[Array, "A W"],
    slots: Int[Array, "A"] | None,
    table: Int[Array, "S C"] | None = None,
) -> Float[Array, "A W H E"]:
    """Attention of each query row over the rows ``0..position`` of its request's slot.

    Same arguments and result as `pallas_kernels.paged_attention.paged_attention`. Scores,
    softmax and sums are fp32; the unnormalised weights are rounded to the cache's dtype for
    the product with ``values``, and the sum is divided in fp32.
    """
    requests, width, heads, head_dim = query.shape
    slot_count = keys.shape[0] if table is None else table.shape[0]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if slots is None:
        limit = position
    else:
        present = (slots >= 0) & (slots < slot_count)
        limit = jnp.where(present[:, None], position, -1)
        slots = jnp.where(present, slots, 0)
    if table is not None:
        table = table if slots is None else table[slots]
        keys, values = rows_of(keys, table), rows_of(values, table)
    elif slots is not None:
        keys, values = keys[slots], values[slots]

    capacity = keys.shape[2]
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
