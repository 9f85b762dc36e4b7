"""Random numbers of a step, keyed by (request seed, request's step count, role, position).

Never by absolute position: a position that is trimmed and drafted again must get fresh noise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

DRAFT, ACCEPT, RESIDUAL, BONUS = range(4)
_ROLES = 4


def step_keys(seed: UInt32[Array, "S 2"], step: Int[Array, "S"]) -> Array:
    """``[S]`` typed keys of this step of each request."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed), step)


def _fold(keys: Array, role: int | Int[Array, "S"], position: int | Int[Array, "S"]) -> Array:
    index = jnp.broadcast_to(jnp.asarray(role + _ROLES * position, jnp.uint32), keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, index)


def gumbel(
    keys: Array, role: int | Int[Array, "S"], position: int | Int[Array, "S"], vocab: int
) -> Float[Array, "S V"]:
    """Standard Gumbel noise: ``argmax(logits + gumbel)`` draws from ``softmax(logits)``."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(
        _fold(keys, role, position)
    )


def uniform(keys: Array, role: int, positions: Int[Array, "G"]) -> Float[Array, "S G"]:
    """Uniform numbers in [0, 1), one a request and position."""

    def column(position: Int[Array, ""]) -> Float[Array, "S"]:
        return jax.vmap(jax.random.uniform)(_fold(keys, role, position))

    return jax.vmap(column, out_axes=1)(positions)
