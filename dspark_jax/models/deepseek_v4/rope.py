"""Phases of DeepSeek-V4's rotary embedding, which has one base for windows and one for entries."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_rope import frequencies
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config


def phases(
    config: DeepseekV4Config, position: Int[Array, "*B"], *, compressed: bool
) -> tuple[Float[Array, "*B R/2"], Float[Array, "*B R/2"]]:
    """fp32 cosines and sines for a layer with entries (``compressed``) or with a window alone."""
    width = config.qk_rope_head_dim
    if compressed:
        frequency = frequencies(width, config.compress_rope_theta, config.compress_yarn)
    else:
        frequency = frequencies(width, config.rope_theta, None)
    angle = position[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)
