"""Anchors: eligible, sorted, without repetition, uniform, fixed by the key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.anchors import sample_anchors

MASK = jnp.array([[0, 0, 1, 1, 1, 0, 1, 0, 1, 1], [1] * 10, [0] * 10], bool)


def test_anchors_and_their_successors_are_supervised_and_dummies_stand_last():
    anchors, keep = jax.jit(sample_anchors, static_argnums=2)(jax.random.key(0), MASK, 5)
    assert anchors[0, :3].tolist() == [2, 3, 8]
    assert keep.tolist() == [[True] * 3 + [False] * 2, [True] * 5, [False] * 5]
    assert jnp.all(jnp.where(keep, 0, anchors) == 0)
    assert jnp.all(jnp.diff(anchors[1]) > 0)


def test_every_eligible_position_is_drawn_equally_often():
    keys = jax.random.split(jax.random.key(1), 4000)
    anchors, _ = jax.vmap(lambda key: sample_anchors(key, MASK[1:2], 3))(keys)
    share = np.bincount(np.asarray(anchors).ravel(), minlength=9) / 4000
    np.testing.assert_allclose(share, 1 / 3, atol=0.03)


def test_the_key_fixes_the_anchors():
    draw = [sample_anchors(jax.random.key(seed), MASK[1:2], 4)[0].tolist() for seed in (0, 0, 1)]
    assert draw[0] == draw[1] != draw[2]


def test_more_anchors_than_positions_is_an_error():
    with pytest.raises(ValueError, match="10 anchors asked of sequences with 9"):
        sample_anchors(jax.random.key(0), MASK, 10)
