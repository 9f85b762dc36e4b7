"""Rotary phases against their definition."""

import jax.numpy as jnp
import numpy as np

from dspark_jax.models.config import RopeScaling
from dspark_jax.models.layers import rope_phases, rotate


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


def test_phases_are_fp32_and_right_far_beyond_32768_positions():
    position, theta, width = 40_001, 10_000.0, 64
    cos, sin = rope_phases(jnp.array([position], jnp.int32), width, theta, None)
    assert cos.dtype == sin.dtype == jnp.float32
    angle = position * theta ** (-np.arange(0, width, 2) / width)
    np.testing.assert_allclose(cos[0], np.cos(angle), atol=1e-2)
    np.testing.assert_allclose(sin[0], np.sin(angle), atol=1e-2)


def test_bf16_heads_far_into_a_text_keep_their_relative_angle():
    """Scores depend on the distance of two positions, wherever both stand."""
    random = np.random.default_rng(0)
    query, key = (jnp.asarray(random.normal(size=(1, 1, 64)), jnp.bfloat16) for _ in range(2))

    def score(start):
        cos, sin = rope_phases(jnp.array([start, start + 3]), 64, 10_000.0, None)
        turned = [rotate(x, cos[i : i + 1], sin[i : i + 1]) for i, x in enumerate((query, key))]
        return float((turned[0] * turned[1]).astype(jnp.float32).sum())

    assert abs(score(0) - score(40_000)) < 0.3
