"""The few layers every model here is made of, as pure functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.config import RopeScaling
from pallas_kernels.rope_write.reference import rotate
from pallas_kernels.row_linear.reference import linear, rms_norm

__all__ = ["linear", "rms_norm", "rope_phases", "rotate", "swiglu"]


def rope_phases(
    position: Int[Array, "..."], head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Array, "... E/2"], Float[Array, "... E/2"]]:
    """fp32 cosines and sines of rotary position embedding at any position."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        wavelength = 2 * jnp.pi / frequency
        old = scaling.original_max_position_embeddings
        smooth = (old / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = jnp.clip(smooth, 0.0, 1.0)
        frequency = frequency * ((1 - smooth) / scaling.factor + smooth)
    angle = position[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def swiglu(
    x: Float[Array, "... D"], gate_up: Float[Array, "2F D"], down: Float[Array, "D F"]
) -> Array:
    """SwiGLU MLP with gate and up fused in one product."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)
