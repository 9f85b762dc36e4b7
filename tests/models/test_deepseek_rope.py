"""Phases of DeepSeek's decoders far into a text."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.deepseek_rope import Yarn, frequencies
from dspark_jax.models.deepseek_v4.rope import phases
from dspark_jax.models.deepseek_v32.attention import position_phases

CONFIG = types.SimpleNamespace(
    qk_rope_head_dim=64,
    rope_theta=10_000.0,
    yarn=Yarn(40.0, 4096, 32.0, 1.0),
    compress_rope_theta=160_000.0,
    compress_yarn=Yarn(16.0, 65_536, 32.0, 1.0),
)


def window(position):
    return phases(CONFIG, position, compressed=False)


def entries(position):
    return phases(CONFIG, position, compressed=True)


def latent(position):
    return position_phases(CONFIG, position)


@pytest.mark.parametrize(
    ("of", "theta", "yarn"),
    [
        (window, CONFIG.rope_theta, None),
        (entries, CONFIG.compress_rope_theta, CONFIG.compress_yarn),
        (latent, CONFIG.rope_theta, CONFIG.yarn),
    ],
)
def test_phases_are_fp32_and_right_far_beyond_32768_positions(of, theta, yarn):
    position = 120_001
    cos, sin = of(jnp.array([position], jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    angle = position * frequencies(64, theta, yarn).astype(np.float64)
    np.testing.assert_allclose(cos[0], np.cos(angle), atol=1e-2)
    np.testing.assert_allclose(sin[0], np.sin(angle), atol=1e-2)
    # neighbours stay apart by the angle of one position, which half precision would lose
    after, _ = of(jnp.array([position + 1], jnp.int32))
    step = frequencies(64, theta, yarn)
    np.testing.assert_allclose(after[0], cos[0] * np.cos(step) - sin[0] * np.sin(step), atol=1e-2)
