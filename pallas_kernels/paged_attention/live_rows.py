"""Attention that reads the live rows of the cache alone, block by block: the CPU implementation.

XLA's shapes are fixed, so the definition computes over every row a slot has room for. Here a loop
ends at the longest request of the call, and a page table is gathered a block at a time.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.reference import rows_of

BLOCK = 128
"""Rows of a turn of the loop: fewer cost more turns than they save, more are often not live."""


def unsupported(keys: jax.Array, table: jax.Array | None) -> str | None:
    """Why a loop would be no loop; None if it pays."""
    rows = keys.shape[2] if table is None else keys.shape[2] * table.shape[1]
    return None if rows > BLOCK else f"{rows} rows a slot are a block of {BLOCK} or less"


def paged_attention(
    query: Float[Array, "A W H E"],
    keys: Float[Array, "B N P E"],
    values: Float[Array, "B N P E"],
    position: Int[Array, "A W"],
    slots: Int[Array, "A"] | None = None,
    table: Int[Array, "S C"] | None = None,
    *,
    block: int = BLOCK,
) -> Float[Array, "A W H E"]:
    """Same arguments and result as `pallas_kernels.paged_attention.paged_attention`.

    A request's result does not depend on how long the others of the call are: a block with
    nothing visible multiplies its sums by one and adds zeros.
    """
    requests, width, heads, head_dim = query.shape
    _, kv_heads, page, _ = keys.shape
    slot_count = keys.shape[0] if table is None else table.shape[0]
    group = heads // kv_heads
    limit = position
    if slots is not None:
        present = (slots >= 0) & (slots < slot_count)
        limit = jnp.where(present[:, None], position, -1)
        slots = jnp.where(present, slots, 0)
    if table is not None:
        table = table if slots is None else table[slots]
        block = max(1, block // page) * page
        block = min(block, table.shape[1] * page)
        capacity = table.shape[1] * page
    else:
        capacity = page
        block = min(block, capacity)

    def at(start: Int[Array, ""], pool: Array) -> Float[Array, "A N K E"]:
        """Rows ``start..start + block`` of every request."""
        if table is not None:
            columns = jax.lax.dynamic_slice_in_dim(table, start // page, block // page, axis=1)
            return rows_of(pool, columns)
        rows = jax.lax.dynamic_slice_in_dim(pool, start, block, axis=2)
        return rows if slots is None else rows[slots]

    rows = query.reshape(requests, width, kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(requests, kv_heads, width * group, head_dim)
    last = jnp.repeat(limit, group, axis=1)[:, None, :, None]
    longest = limit.max(axis=1)[:, None, None, None]

    def turn(index: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple:
        top, total, out = carry
        # The last block is moved back to end with the cache; its first rows were read before.
        begin = index * block
        start = jnp.minimum(begin, capacity - block)
        row = start + jnp.arange(block, dtype=jnp.int32)
        scores = jnp.einsum(
            "anqe,anke->anqk", rows, at(start, keys), preferred_element_type=jnp.float32
        )
        scores = scores * (1 / math.sqrt(head_dim))
        visible = (row >= begin) & (row <= last)
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        risen = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(scores - risen), 0)
        found = at(start, values)
        # A weight of zero does not silence a NaN, so rows nobody may read are zeroed themselves.
        found = jnp.where(row[:, None] <= longest, found, 0)
        added = jnp.einsum(
            "anqk,anke->anqe",
            weights.astype(found.dtype),
            found,
            preferred_element_type=jnp.float32,
        )
        shrunk = jnp.exp(top - risen)
        total = total * shrunk + weights.sum(axis=-1, keepdims=True)
        return risen, total, out * shrunk + added

    shape = (*rows.shape[:3], 1)
    carry = (
        jnp.full(shape, jnp.finfo(jnp.float32).min),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
    )
    turns = (limit.max() + block) // block
    _, total, out = jax.lax.fori_loop(0, turns, turn, carry)
    out = (out / jnp.where(total > 0, total, 1)).astype(query.dtype)
    out = out.reshape(requests, kv_heads, width, group, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(query.shape)
