"""Loading the target and its drafters for a measurement."""

from __future__ import annotations

import jax.numpy as jnp

from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget


def open_drafter(name: str, target: LoadedTarget) -> LoadedDrafter:
    """A drafter in the dtype of its target's weights."""
    dtype = jnp.dtype(target.config.family.input_embedding(target.weights).dtype)
    pair = (target.config, target.weights)
    return load_drafter(name, pair, dtype, stop_token_ids=target.stop_token_ids)
