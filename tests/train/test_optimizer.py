"""The schedule and the update rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.initialize import initial_weights
from train.optimizer import MUON_RMS, clipped_optimizer, learning_rate_schedule


def test_four_percent_warm_up_then_cosine_to_zero():
    schedule = learning_rate_schedule(6e-4, 1000)
    rates = [float(schedule(step)) for step in (0, 20, 40, 520, 1000)]
    np.testing.assert_allclose(rates, [0, 3e-4, 6e-4, 3e-4, 0], atol=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_short_runs_have_finite_rates(steps):
    schedule = learning_rate_schedule(6e-4, steps)
    assert all(np.isfinite(float(schedule(step))) for step in range(steps))


def test_gradients_are_clipped_and_weights_do_not_decay():
    optimizer = clipped_optimizer(optax.constant_schedule(0.1))
    weights = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([7.0])}
    state = jax.jit(optimizer.init)(weights)
    big = {"a": jnp.array([300.0, 400.0]), "b": jnp.array([0.0])}
    updates, state = jax.jit(optimizer.update)(big, state, weights)
    moments = optax.tree.get(state, "mu")
    np.testing.assert_allclose(moments["a"], [0.06, 0.08], rtol=1e-5)
    assert updates["b"] == 0


def test_muon_moves_every_direction_of_a_backbone_matrix_alike_and_leaves_heads_to_adamw(
    vanilla,
):
    weights = initial_weights(vanilla.config, jax.random.key(0))
    random = np.random.default_rng(1)
    gradient = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), weights)
    first = {}
    for name in ("adamw", "muon"):
        optimizer = clipped_optimizer(optax.constant_schedule(1.0), name)
        update = jax.jit(lambda g, w, one=optimizer: one.update(g, one.init(w), w)[0])
        first[name] = jax.device_get(update(gradient, weights))
    for matrix in (first["muon"].fc, first["muon"].layers[0].kv):
        spectrum = np.linalg.svd(matrix, compute_uv=False)
        assert spectrum[-1] > 0.5 * spectrum[0]
        size = np.sqrt(np.mean(matrix**2))
        np.testing.assert_allclose(size, MUON_RMS, rtol=0.4)
    spectrum = np.linalg.svd(first["adamw"].fc, compute_uv=False)
    assert spectrum[-1] < 0.5 * spectrum[0]
    for path in ("markov", "confidence"):
        # Adam's first update is a sign of the gradient, whatever its size.
        for leaf in jax.tree.leaves(getattr(first["muon"], path)):
            assert np.all(np.abs(leaf) > MUON_RMS)
