"""Attention of training: cuDNN's kernel where it runs, XLA elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attention(
    query: Float[Array, "B T H E"],
    key: Float[Array, "B K N E"],
    value: Float[Array, "B K N E"],
    **masking: Any,
) -> Float[Array, "B T H E"]:
    """``jax.nn.dot_product_attention``; scores never reach memory on a GPU in 16 bits.

    cuDNN's kernel takes 16-bit inputs only, so fp32 goes through XLA.
    """
    fused = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(
        query, key, value, implementation="cudnn" if fused else "xla", **masking
    )
