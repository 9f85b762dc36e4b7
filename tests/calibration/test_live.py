"""Live calibration error: that of the metric over the same blocks, and it follows a drift."""

import numpy as np
import pytest

from dspark_jax.calibration.live import LiveCalibration
from dspark_jax.calibration.metrics import expected_calibration_error


def blocks(count, truth, seed=0):
    """Survivals of two positions, windows, and drafts accepted with ``truth`` a position."""
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.uniform(0.2, 1.0, (count, 2)), axis=1)
    accepted = np.cumprod(random.uniform(size=(count, 2)) < truth, axis=1).sum(axis=1)
    return survival, random.integers(0, 3, count), accepted


def test_the_error_is_that_of_the_metric_over_verified_positions():
    survival, verified, accepted = blocks(500, 0.6)
    live = LiveCalibration(2, decay=0.9)
    for part in np.array_split(np.arange(500), 7):
        live.observe(survival[part], verified[part], np.minimum(accepted, verified)[part])
    for position in (1, 2):
        known = verified >= position
        label = accepted[known] >= position
        predicted = survival[known, position - 1]
        wanted = expected_calibration_error(predicted, label)
        assert live.lifetime.error[position - 1] == pytest.approx(wanted)
        assert live.lifetime.bias[position - 1] == pytest.approx(np.mean(predicted - label))


def test_a_drift_shows_in_what_is_recent_before_it_shows_in_all():
    live = LiveCalibration(1, decay=0.5)
    good = np.full((100, 1), 0.75)
    for _ in range(50):
        live.observe(good, np.ones(100, int), (np.arange(100) < 75).astype(int))
    assert live.recent.error[0] == pytest.approx(0.0)
    for _ in range(10):
        live.observe(good, np.ones(100, int), np.zeros(100, int))
    assert live.recent.error[0] > 0.74
    assert live.lifetime.error[0] < 0.2


def test_several_steps_at_once_decay_as_one_after_the_other():
    one, other = LiveCalibration(2, 0.9), LiveCalibration(2, 0.9)
    survival, verified, accepted = blocks(10, 0.6)
    for live in (one, other):
        live.observe(survival, verified, accepted)
    for _ in range(3):
        one.observe(survival[:0], verified[:0], accepted[:0])
    other.observe(survival[:0], verified[:0], accepted[:0], steps=3)
    assert other.recent.count == pytest.approx(one.recent.count)


def test_a_position_that_was_never_verified_has_no_error():
    live = LiveCalibration(2, 0.9)
    live.observe(np.full((3, 2), 0.5), np.array([1, 0, 1]), np.array([1, 0, 0]))
    assert np.isnan(live.recent.error[1])
    assert live.recent.count.sum() == 2
