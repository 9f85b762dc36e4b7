"""The confidence head: how likely a draft position is accepted once all before it were."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.drafter.weights import ConfidenceHead


def confidence_logit(
    head: ConfidenceHead,
    hidden: Float[Array, "... D"],
    embedding: Float[Array, "... R"] | None,
) -> Float[Array, "..."]:
    """fp32 logit of conditional acceptance.

    ``hidden`` is the final-normed state of the position, ``embedding`` the ungated Markov
    embedding of the *previous* token (None for a head on hidden states alone). The drafted
    token itself is never an input: a window that depended on it would not be lossless.
    """
    wide = hidden.astype(jnp.float32)
    if embedding is not None:
        wide = jnp.concatenate([wide, embedding.astype(jnp.float32)], axis=-1)
    weight = head.weight.astype(jnp.float32)
    return jnp.sum(wide * weight, axis=-1) + head.bias.astype(jnp.float32)
