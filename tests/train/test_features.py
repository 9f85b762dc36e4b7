"""Online features equal those of the decoding forward, and padding does not reach them."""

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


@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_tiny"])
def test_features_equal_those_of_the_cached_forward(name, request):
    target = load_target(request.path.parents[1] / "golden" / name, jnp.float32)
    config, weights = target.config, target.weights
    tokens = jnp.arange(40).reshape(2, 20) * 7 % config.vocab_size
    taps, last = features(config, weights, tokens, TAPS)
    cache = dense.init_cache(config, 2, 20, jnp.float32)
    packed = rectangle(tokens, jnp.zeros(2, jnp.int32), jnp.full(2, 20))
    expected_last, expected_taps, _ = dense.forward(config, weights, cache, packed, taps=TAPS)
    np.testing.assert_allclose(taps.reshape(40, -1), expected_taps, atol=1e-4)
    np.testing.assert_allclose(last.reshape(40, -1), expected_last, atol=1e-4)


def test_padding_at_the_end_changes_no_feature_before_it(tiny_target):
    tokens = jnp.arange(20)[None] + 20
    padded = tokens.at[:, 12:].set(0)
    whole, cut = (
        features(tiny_target.config, tiny_target.weights, ids, TAPS) for ids in (tokens, padded)
    )
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one[:, :12], other[:, :12])
