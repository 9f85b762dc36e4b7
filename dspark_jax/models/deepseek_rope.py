"""Rotary position embedding of DeepSeek's decoders: interleaved pairs at the tail of a head."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Phases = tuple[Float[Array, "*B R/2"], Float[Array, "*B R/2"]]


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN's rescaling of rotary frequencies; lengths in tokens, betas in turns."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


def frequencies(width: int, theta: float, yarn: Yarn | None) -> Float[np.ndarray, "R/2"]:
    """Radians a token of every pair; YaRN (arXiv 2309.00071, section 3.2) stretches long waves.

    Frequencies alone are rescaled: phases get no factor of YaRN's, and scores none here.
    """
    pair = np.arange(width // 2)
    frequency = theta ** (-2.0 * pair / width)
    if yarn is None:
        return frequency.astype(np.float32)

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns over the original context."""
        wavelength = yarn.original_max_position_embeddings / turns
        return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), width - 1)
    # a ramp of no width is a step
    stretched = np.clip((pair - low) / max(high - low, 1e-3), 0.0, 1.0)
    frequency = frequency / yarn.factor * stretched + frequency * (1 - stretched)
    return frequency.astype(np.float32)


def rotate_tail(
    x: Float[Array, "... E"], phases: Phases, *, inverse: bool = False
) -> Float[Array, "... E"]:
    """Turn pairs (2i, 2i+1) of the last R numbers, backwards if ``inverse``.

    The phases' leading axes must broadcast against those of ``x``.
    """
    cos, sin = phases
    if inverse:
        sin = -sin
    head, tail = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    pairs = tail.astype(jnp.float32).reshape(*tail.shape[:-1], cos.shape[-1], 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([head, turned.reshape(tail.shape).astype(x.dtype)], axis=-1)


def for_heads(phases: Phases) -> Phases:
    """The same phases for every head of a row."""
    cos, sin = phases
    return cos[..., None, :], sin[..., None, :]
