"""Window rows in pure JAX: the definition of right, and what XLA makes one or two loops of."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def swa_index(
    position: Int[Array, "T"],
    request: Int[Array, "T"],
    ring: Int[Array, "A"],
    origin: Int[Array, "A"],
    window: int,
    length: int,
) -> tuple[Int[Array, "T w"], Int[Array, "T"]]:
    """Same arguments and result as `pallas_kernels.swa_index.swa_index`."""
    first = jnp.maximum(position - window + 1, 0)
    seen = first[:, None] + jnp.arange(window, dtype=jnp.int32)
    page = jnp.take(ring, request, mode="fill", fill_value=-1)[:, None]
    offset = (seen - jnp.take(origin, request, mode="fill", fill_value=0)[:, None]) % length
    rows = jnp.where((seen <= position[:, None]) & (page >= 0), page * length + offset, -1)
    return rows, jnp.clip(position + 1, 0, window)
