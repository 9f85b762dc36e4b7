"""The online variant: what counts as a trial, how strong the prior is, how it forgets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibration.blocks import VerifiedBlocks
from dspark_jax.calibration.online import GRID, fresh, observe, temperatures


def stream(state, blocks, batch=64):
    step = jax.jit(observe)
    for begin in range(0, len(blocks), batch):
        part = slice(begin, begin + batch)
        state = step(
            state, jnp.float32(blocks.logits[part]), blocks.accepted[part], blocks.verified[part]
        )
    return state


def test_without_a_trial_every_temperature_is_one():
    assert temperatures(fresh(5)).tolist() == [1.0] * 5


def test_three_trials_move_a_temperature_by_no_more_than_their_share():
    state = fresh(2)
    logits = jnp.array([[4.0, 0.0]] * 3)
    state = observe(state, logits, jnp.zeros(3, int), jnp.ones(3, int))
    own, other = np.log(temperatures(state))
    raw = np.log(GRID[-1])
    shared = 3 / 67 * raw
    assert other == pytest.approx(shared, rel=1e-5)
    assert own == pytest.approx(3 / 67 * raw + 64 / 67 * shared, rel=1e-5)


def test_positions_that_were_not_verified_or_not_reached_add_no_trial():
    state = observe(fresh(3), jnp.ones((4, 3)), jnp.array([0, 1, 2, 1]), jnp.array([0, 3, 2, 1]))
    assert state.trials.sum(axis=1).tolist() == [3.0, 2.0, 0.0]
    assert state.accepted.sum(axis=1).tolist() == [3.0, 1.0, 0.0]


def test_a_confidence_that_is_not_a_number_is_no_trial():
    state = observe(fresh(1), jnp.array([[jnp.nan], [1.0]]), jnp.array([1, 1]), jnp.array([1, 1]))
    assert state.trials.sum() == 1
    assert jnp.isfinite(temperatures(state)).all()


def test_logits_beyond_the_range_fall_into_the_outer_bins():
    state = observe(fresh(1), jnp.array([[-50.0], [50.0]]), jnp.array([0, 1]), jnp.array([1, 1]))
    assert state.trials[0, 0] == state.trials[0, -1] == 1
    assert state.logit_sum[0, [0, -1]].tolist() == [-8.0, 8.0]


def test_a_position_without_a_trial_takes_what_the_others_have_learnt(synthetic):
    blocks = synthetic((2.0, 2.0, 2.0), 20_000)
    cut = VerifiedBlocks(blocks.logits, np.minimum(blocks.accepted, 2), np.full(20_000, 2))
    state = stream(fresh(3), cut)
    assert state.trials.sum(axis=1)[2] == 0
    assert float(temperatures(state)[2]) == pytest.approx(2.0, rel=0.1)


def test_a_change_of_the_stream_is_followed(synthetic):
    before = stream(fresh(1), synthetic((1.0,), 64 * 600))
    assert float(temperatures(before)[0]) == pytest.approx(1.0, rel=0.12)
    after = stream(before, synthetic((3.0,), 64 * 5000, seed=1))
    assert float(temperatures(after)[0]) == pytest.approx(3.0, rel=0.12)


def test_an_update_works_inside_jit_and_keeps_its_shapes():
    state = fresh(4)
    updated = jax.eval_shape(
        observe, state, jnp.zeros((8, 4)), jnp.zeros(8, int), jnp.zeros(8, int)
    )
    assert jax.tree.map(jnp.shape, updated) == jax.tree.map(jnp.shape, state)
