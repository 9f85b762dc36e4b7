"""Top-k by a full sort in pure JAX: what the kernel must compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def top_k(scores: Float[Array, "T K"], seen: Int[Array, "T"], count: int) -> Int[Array, "T k"]:
    """Same arguments and result as `pallas_kernels.top_k.top_k`."""
    total = scores.shape[1]
    entry = jnp.arange(total, dtype=jnp.int32)
    # Visible entries stay above the masked ones whatever they hold.
    visible = jnp.maximum(jnp.where(jnp.isnan(scores), jnp.inf, scores), jnp.finfo(jnp.float32).min)
    visible = jnp.where(visible == 0, 0.0, visible)
    masked = jnp.where(entry < seen[:, None], visible, -jnp.inf)
    best = total - 1 - jax.lax.top_k(masked[:, ::-1], min(count, total))[1].astype(jnp.int32)
    best = jnp.sort(jnp.where(best < seen[:, None], best, total), axis=1)
    return jnp.where(best < total, best, -1)
