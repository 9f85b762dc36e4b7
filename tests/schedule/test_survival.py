"""Survivals are running products of calibrated confidences."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.schedule.survival import AGING_RATE, remember, running_product, survival

LOGITS = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.just(float("nan"))), min_size=12, max_size=12
)


@settings(deadline=None)
@given(LOGITS)
def test_survival_never_rises_along_a_block(values):
    logits = np.array(values, np.float32).reshape(2, 6)
    found = np.asarray(survival(logits, np.ones((2, 6), np.float32)))
    assert (found[:, 1:] <= found[:, :-1]).all()
    assert ((found >= 0) & (found <= 1)).all()


def test_survival_is_the_product_of_conditional_acceptances():
    logits = np.log(np.array([[0.8, 0.9, 0.5]]) / (1 - np.array([[0.8, 0.9, 0.5]])))
    found = survival(logits.astype(np.float32), np.ones((1, 3), np.float32))
    np.testing.assert_allclose(found, [[0.8, 0.72, 0.36]], rtol=1e-6)


def test_temperatures_divide_the_logits_of_their_own_position():
    logits = np.array([[2.0, 2.0]], np.float32)
    temperatures = np.array([[1.0, 2.0]], np.float32)
    first, second = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(survival(logits, temperatures), [[first, first * second]], rtol=1e-6)


def test_a_nan_confidence_is_no_confidence_from_there_on():
    logits = np.array([[3.0, np.nan, 3.0], [3.0, 3.0, 3.0]], np.float32)
    found = np.asarray(survival(logits, np.ones((2, 3), np.float32)))
    assert found[0, 0] > 0.9
    assert (found[0, 1:] == 0).all()
    assert (found[1] > 0.8).all()
    np.testing.assert_array_equal(running_product(np.array([[0.5, np.nan, 1.0]])), [[0.5, 0, 0]])


def test_an_unmeasured_confidence_drifts_to_one():
    known = np.array([[0.0, 0.5, 1.0]], np.float32)
    nothing = np.zeros((1, 3), bool)
    found = np.asarray(remember(np.zeros((1, 3)), known, nothing, 1.0))
    np.testing.assert_allclose(found, known + AGING_RATE * (1 - known), rtol=1e-6)
    for _ in range(500):
        found = remember(np.zeros((1, 3)), found, nothing, 1.0)
    np.testing.assert_allclose(found, 1.0, atol=1e-5)


def test_a_measured_confidence_moves_what_is_known_by_its_weight():
    new, known = np.array([[0.25, 0.5, np.nan]]), np.array([[0.75, 0.5, 0.5]])
    everything = np.ones((1, 3), bool)
    found = remember(new, known, everything, 0.5)
    np.testing.assert_allclose(found, [[0.5, 0.5, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(remember(new, known, everything, 1.0), [[0.25, 0.5, 0.0]])
