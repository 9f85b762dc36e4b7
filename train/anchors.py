"""Where in a sequence the blocks of a training step begin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key


def sample_anchors(
    key: Key[Array, ""], loss_mask: Bool[Array, "B K"], count: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Up to ``count`` anchors a sequence, uniform without replacement, sorted.

    A position is eligible when it and its successor are supervised. Returns the anchors and
    which of them are real; dummies stand last and point at position 0.
    """
    rows, length = loss_mask.shape
    if count > length - 1:
        raise ValueError(
            f"{count} anchors asked of sequences with {length - 1} possible positions; "
            "lower num_anchors or raise sequence_length"
        )
    eligible = loss_mask[:, :-1] & loss_mask[:, 1:]
    draws = jnp.where(eligible, jax.random.uniform(key, (rows, length - 1)), -1.0)
    _, picked = jax.lax.top_k(draws, count)
    keep = jnp.take_along_axis(eligible, picked, axis=1)
    ordered = jnp.sort(jnp.where(keep, picked, length), axis=1)
    keep = ordered < length
    return jnp.where(keep, ordered, 0).astype(jnp.int32), keep
