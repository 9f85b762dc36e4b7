"""The most likely token of every row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def best_token(scores: Float[Array, "... V"]) -> Int[Array, "..."]:
    """``argmax`` over the vocabulary, the lowest id among equals; scores must not be NaN.

    XLA's CPU backend runs an argmax element by element. Two plain reductions, the maximum and
    then the lowest id that reaches it, take half the time there.
    """
    if jax.default_backend() != "cpu":
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.min(jnp.where(scores == highest, column, scores.shape[-1] - 1), axis=-1)
