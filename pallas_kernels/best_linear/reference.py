"""The best output of a linear layer in pure JAX: what the kernel must compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.row_linear.reference import linear


def best_linear(
    x: Float[Array, "T I"],
    weight: Float[Array, "V I"],
    low_rank: tuple[Float[Array, "T R"], Float[Array, "V R"]] | None = None,
) -> tuple[Int[Array, "T"], Float[Array, "T"]]:
    """Same arguments and result as `pallas_kernels.best_linear.best_linear`."""
    logits = linear(x, weight, jnp.float32)
    if low_rank is not None:
        logits = logits + linear(*low_rank, jnp.float32)
    token = best_token(logits)
    return token, jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]


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
