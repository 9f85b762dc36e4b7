"""Top-k and top-p filters of target logits, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt


def filter_logits(
    logits: Float[Array, "T V"], top_k: Int[Array, "T"], top_p: Float[Array, "T"]
) -> Float[Array, "T V"]:
    """Logits of the tokens that top-k, then top-p, leave; -inf elsewhere.

    ``logits`` are fp32 and already divided by the temperature. ``top_k`` 0 and ``top_p`` 1.0
    mean off. Top-p acts on the distribution renormalised over the top-k tokens and keeps the
    most likely ones until their mass reaches ``top_p``. Tokens equal to the last one kept are
    kept too; the most likely token always is.
    """
    order = _ordered_bits(logits)
    highest = order.max(axis=-1)
    everything = jnp.zeros_like(highest)

    def last_of_top_k() -> UInt[Array, "T"]:
        def enough_tokens(threshold: UInt[Array, "T"]) -> Array:
            count = (order >= threshold[:, None]).sum(axis=-1, dtype=jnp.int32)
            return count >= top_k

        return jnp.where(top_k > 0, _largest(enough_tokens, highest), 0)

    # Branches, so that a filter nobody asked for does not cost 32 passes over the logits.
    last_k = jax.lax.cond(jnp.any(top_k > 0), last_of_top_k, lambda: everything)

    def last_of_top_p() -> UInt[Array, "T"]:
        weight = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        weight = jnp.where(order >= last_k[:, None], weight, 0.0)
        wanted = top_p * weight.sum(axis=-1)

        def enough_mass(threshold: UInt[Array, "T"]) -> Array:
            return jnp.where(order >= threshold[:, None], weight, 0.0).sum(axis=-1) >= wanted

        return jnp.where(top_p < 1.0, _largest(enough_mass, highest), 0)

    last_p = jax.lax.cond(jnp.any(top_p < 1.0), last_of_top_p, lambda: everything)
    return jnp.where(order >= jnp.maximum(last_k, last_p)[:, None], logits, -jnp.inf)


def _ordered_bits(values: Float[Array, "T V"]) -> UInt[Array, "T V"]:
    """fp32 values as integers of the same order."""
    values = jnp.where(values == 0.0, 0.0, values)  # -0.0 is not below 0.0
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest(
    enough: Callable[[UInt[Array, "T"]], Array], highest: UInt[Array, "T"]
) -> UInt[Array, "T"]:
    """The largest threshold up to ``highest`` for which ``enough`` holds, one bit after another.

    ``enough`` is true up to some threshold and false above it.
    """

    def one_bit(step: Array, found: UInt[Array, "T"]) -> UInt[Array, "T"]:
        tried = found | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(enough(tried) & (tried <= highest), tried, found)

    return jax.lax.fori_loop(0, 32, one_bit, jnp.zeros_like(highest))
