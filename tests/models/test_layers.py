"""Rotary phases against their definition."""

import jax.numpy as jnp
import numpy as np

from dspark_jax.models.config import RopeScaling
from dspark_jax.models.layers import rope_phases


def test_llama3_scaling_leaves_short_waves_and_stretches_long_ones():
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    theta, width, position = 500_000.0, 64, 1234
    cos, sin = rope_phases(jnp.array([position]), width, theta, scaling)
    for pair in range(width // 2):
        frequency = theta ** (-2 * pair / width)
        wavelength = 2 * np.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= 8.0
        elif wavelength >= 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8.0 + smooth * frequency
        assert abs(float(cos[0, pair]) - np.cos(position * frequency)) < 2e-3
        assert abs(float(sin[0, pair]) - np.sin(position * frequency)) < 2e-3
