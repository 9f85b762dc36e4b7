"""The product of one to four bf16 rows on a CPU, written as a loop that XLA vectorises.

XLA's own products of few bf16 rows repack the weights at every call, and a reduction along the
contracted axis stays scalar, because fp32 sums may not be reordered. Here the order is explicit:
every output keeps ``lanes`` running sums side by side, an elementwise loop over contiguous memory,
and they are added up at the end. A row's result is the same to the bit beside any others. For more
rows than four XLA's product is as fast.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LANES = 16
"""Running sums side by side: two vector registers of AVX2, or a multiple of that."""

CHAINS = 4
"""Sums of an output that do not wait for each other; they hide the latency of an addition."""

MOST_TERMS = 60
"""Terms are unrolled, so they cost compile time and registers; wider rows take more lanes."""

MOST_ROWS = 4
"""Above, XLA's product is as fast."""


def lanes_of(width: int) -> int | None:
    """Lanes of rows of ``width``; None where ``rows_product`` won't pay."""
    for lanes in range(LANES, width // CHAINS + 1, LANES):
        if width % lanes == 0 and width // lanes <= MOST_TERMS:
            return lanes
    return None


# jitted so that a layer's products are traced once a shape
@functools.partial(jax.jit, static_argnames="lanes")
def rows_product(
    rows: Float[Array, "T I"], weight: Float[Array, "O I"], lanes: int
) -> Float[Array, "T O"]:
    """``rows @ weight.T`` in fp32; ``lanes`` divides I."""
    # else the rows' own producers would run again for every output; and a decode loop would widen
    # its constant weights once and for all, in twice the memory
    wide, weight = jax.lax.optimization_barrier((rows.astype(jnp.float32), weight))
    # a weight is read once from memory: the rows take turns at it while it is in the cache
    terms = [
        weight[:, None, begin : begin + lanes].astype(jnp.float32)
        * wide[None, :, begin : begin + lanes]
        for begin in range(0, rows.shape[1], lanes)
    ]
    chains = [functools.reduce(jnp.add, terms[first::CHAINS]) for first in range(CHAINS)]
    # else XLA would fuse the loop into the last sum, and it would be scalar again
    return jax.lax.optimization_barrier(functools.reduce(jnp.add, chains)).sum(axis=2).T
