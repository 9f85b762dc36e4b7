"""Causal attention of a few query rows over each request's own cache rows."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def paged_attention(
    query: Float[Array, "A W H E"],
    keys: Float[Array, "S N K E"],
    values: Float[Array, "S N K E"],
    position: Int[Array, "A W"],
    slots: Int[Array, "A"] | None = None,
) -> Float[Array, "A W H E"]:
    """Softmax attention of every query to the rows at or before its own position.

    Query head h reads key/value head ``h // (H / N)``. Scores and softmax are fp32; the result
    has the dtype of ``query``.

    Args:
        query: W rows of A requests, RoPE applied.
        keys: cache rows of S slots, the rows of this batch already written.
        values: as ``keys``.
        position: absolute position of each query; -1 in padding rows, which get zeros.
        slots: cache slot of each request; None when request a is slot a (then A = S). The slot
            of a request whose rows are all padding may be out of range.

    Rows past a request's last query are never read, whatever they hold (NaN included).
    """
    requests, width, heads, head_dim = query.shape
    groups, capacity = keys.shape[1], keys.shape[2]
    if slots is not None:
        keys = jnp.take(keys, slots, axis=0, mode="clip")
        values = jnp.take(values, slots, axis=0, mode="clip")
    grouped = query.reshape(requests, width, groups, heads // groups, head_dim)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(requests, groups, -1, head_dim)
    scores = jnp.einsum("anqe,anke->anqk", grouped, keys, preferred_element_type=jnp.float32)

    row = jnp.arange(capacity, dtype=jnp.int32)
    visible = row <= jnp.repeat(position, heads // groups, axis=1)[:, None, :, None]
    scores = jnp.where(visible, scores * head_dim**-0.5, jnp.finfo(jnp.float32).min)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weight = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    total = jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    # A zero weight does not hide a NaN, so rows that nobody may see are cleared as well.
    written = row <= jnp.max(position, axis=1, keepdims=True)
    values = jnp.where(written[:, None, :, None], values, 0)
    mixed = jnp.einsum(
        "anqk,anke->anqe", weight.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    mixed = (mixed / total).astype(query.dtype)
    mixed = mixed.reshape(requests, groups, width, heads // groups, head_dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(query.shape)
