"""Online features equal those of the decoding forward, and padding does not reach them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.models import dense
from dspark_jax.models.ragged import rectangle
from train.features import target_features

TAPS = (-1, 0, 1)
features = jax.jit(target_features, static_argnums=(0, 3))


@functools.partial(jax.jit, static_argnums=0)
def cached(config, weights, tokens):
    """Taps and last hidden states of the forward that decodes."""
    cache = dense.init_cache(config, *tokens.shape, jnp.float32)
    rows, width = tokens.shape
    packed = rectangle(tokens, jnp.zeros(rows, jnp.int32), jnp.full(rows, width))
    last, taps, _ = dense.forward(config, weights, cache, packed, taps=TAPS)
    return taps, last


@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_tiny"])
def test_features_equal_those_of_the_cached_forward(name, request):
    target = load_target(request.path.parents[1] / "golden" / name, jnp.float32)
    config, weights = target.config, target.weights
    tokens = np.arange(40, dtype=np.int32).reshape(2, 20) * 7 % config.vocab_size
    taps, last = features(config, weights, tokens, TAPS)
    expected_taps, expected_last = cached(config, weights, tokens)
    np.testing.assert_allclose(taps.reshape(40, -1), expected_taps, atol=1e-4)
    np.testing.assert_allclose(last.reshape(40, -1), expected_last, atol=1e-4)


def test_padding_at_the_end_changes_no_feature_before_it(tiny_target):
    tokens = np.arange(20, dtype=np.int32)[None] + 20
    padded = np.where(np.arange(20) < 12, tokens, 0)
    whole, cut = (
        features(tiny_target.config, tiny_target.weights, ids, TAPS) for ids in (tokens, padded)
    )
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one[:, :12], other[:, :12])
