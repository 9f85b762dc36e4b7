"""Queries of many requests packed into rows, and back. Padding of a request has no row."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def apart(packed: Shaped[Array, "T *X"], rows: Int[Array, "A W"]) -> Shaped[Array, "A W *X"]:
    """Queries by request; what has no row shows some other one."""
    return jnp.take(packed, rows, axis=0, mode="clip")


def together(
    values: Shaped[Array, "A W *X"], rows: Int[Array, "A W"], count: int
) -> Shaped[Array, "{count} *X"]:
    """The inverse: ``count`` rows, 0 where ``rows`` names none."""
    queries = jnp.arange(rows.size, dtype=jnp.int32)
    source = jnp.full(count, rows.size, jnp.int32).at[rows.ravel()].set(queries, mode="drop")
    flat = values.reshape(-1, *values.shape[2:])
    return jnp.take(flat, source, axis=0, mode="fill", fill_value=0)
