"""The most likely token, ties included."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.best_linear import best_token


def test_the_best_token_is_numpys_argmax_with_ties_and_infinities():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 5, (64, 17)).astype(np.float32)
    scores[3] = -np.inf
    scores[4, 5] = np.inf
    np.testing.assert_array_equal(best_token(jnp.asarray(scores)), scores.argmax(-1))
