"""Allocation in pure JAX: by a stable sort, which says what is meant, and by counting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MOST_COUNTED = {"cpu": 256, "gpu": 2048}
"""Slots up to which counting who is ahead, one fused loop of their square, beats a sort."""


def counts(slots: int) -> bool:
    """Whether so many slots are counted rather than sorted."""
    return slots <= MOST_COUNTED.get(jax.default_backend(), 0)


def top_b(
    survival: Float[Array, "S G"], valid: Bool[Array, "S G"], budget: Int[Array, ""]
) -> Int[Array, "S"]:
    """Same arguments and result as `pallas_kernels.top_b.top_b`."""
    run = by_ranks if counts(survival.size) else by_sort
    return run(survival, valid, budget)


def by_sort(
    survival: Float[Array, "S G"], valid: Bool[Array, "S G"], budget: Int[Array, ""]
) -> Int[Array, "S"]:
    """The first ``budget`` slots of a stable sort."""
    requests = survival.shape[0]
    # Flattened by position first, a stable sort settles ties as wanted.
    key = jnp.where(valid, survival, -1.0).T.reshape(-1)
    order = jnp.argsort(key, stable=True, descending=True)
    taken = jnp.arange(order.shape[0]) < jnp.minimum(budget, valid.sum())
    return jnp.zeros(requests, jnp.int32).at[order % requests].add(taken.astype(jnp.int32))


def by_ranks(
    survival: Float[Array, "S G"], valid: Bool[Array, "S G"], budget: Int[Array, ""]
) -> Int[Array, "S"]:
    """The kernel's own method: a slot is taken if fewer than ``budget`` are ahead of it."""
    key = jnp.where(valid, survival, -1.0).T.reshape(-1)
    place = jax.lax.iota(jnp.int32, key.shape[0])
    ahead = (key > key[:, None]) | ((key == key[:, None]) & (place < place[:, None]))
    taken = (key >= 0) & (ahead.sum(axis=1, dtype=jnp.int32) < budget)
    return taken.reshape(survival.shape[::-1]).sum(axis=0, dtype=jnp.int32)
