"""The few layers every model here is made of, as pure functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dspark_jax.models.config import RopeScaling
from dspark_jax.models.one_row import lanes_of, row_product


def linear(
    x: Float[Array, "... I"], weight: Float[Array, "O I"], out_dtype: DTypeLike | None = None
) -> Float[Array, "... O"]:
    """``x @ weight.T``, accumulated and returned in ``out_dtype`` (None: the dtype of ``x``).

    A one-row bf16 product falls off XLA's fast path on CPUs: ``one_row`` has its own, and where
    that does not pay a single row is computed as two.
    """
    lead = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    dtype = x.dtype if out_dtype is None else out_dtype
    single = rows.shape[0] == 1 and x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    if single:
        lanes = lanes_of(rows.shape[1])
        if lanes is not None:
            out = row_product(rows[0], weight, lanes).astype(dtype)
            return out.reshape(*lead, weight.shape[0])
        rows = jnp.concatenate([rows, rows])
    out = jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    if single:
        out = out[:1]
    return out.reshape(*lead, weight.shape[0])


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "... D"]:
    """RMS norm in fp32, result in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight.astype(x.dtype)


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


def rotate(
    x: Float[Array, "... X E"], cos: Float[Array, "... E/2"], sin: Float[Array, "... E/2"]
) -> Float[Array, "... X E"]:
    """Apply RoPE to heads ``x``, halves split as Hugging Face does; phases lack the head axis."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def swiglu(
    x: Float[Array, "... D"], gate_up: Float[Array, "2F D"], down: Float[Array, "D F"]
) -> Array:
    """SwiGLU MLP with gate and up fused in one product."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)
