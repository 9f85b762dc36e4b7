"""ECE, AUROC and Brier against values worked out by hand and by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.calibration.metrics import (
    auroc,
    brier,
    expected_calibration_error,
    reliability_bins,
)


def test_the_error_of_a_hand_made_case():
    probability = [0.1, 0.1, 0.9, 0.9]
    label = [0, 1, 1, 1]
    # bin of 0.1: |0.1 - 0.5| on half of the samples, bin of 0.9: |0.9 - 1| on the other
    assert expected_calibration_error(probability, label) == pytest.approx(0.25)


def test_truthful_probabilities_have_a_small_error_and_overconfident_ones_their_gap():
    random = np.random.default_rng(0)
    probability = random.uniform(size=200_000)
    label = random.uniform(size=200_000) < probability
    assert expected_calibration_error(probability, label) < 0.005
    assert expected_calibration_error(np.full(200_000, 0.8), label) == pytest.approx(0.3, abs=0.01)


def test_bins_are_of_equal_width_and_one_falls_into_the_last():
    bins = reliability_bins([0.0, 0.25, 0.5, 1.0], [0, 0, 1, 1], bins=4)
    assert bins.count.tolist() == [1, 1, 1, 1]
    assert bins.observed.tolist() == [0, 0, 1, 1]


def test_an_empty_bin_is_not_a_number_and_adds_no_error():
    bins = reliability_bins([0.1, 0.1], [0, 0], bins=2)
    assert np.isnan(bins.predicted[1])
    assert np.isnan(bins.observed[1])
    assert bins.error == pytest.approx(0.1)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40).filter(
        lambda pairs: len({label for _, label in pairs}) == 2
    )
)
def test_auroc_equals_the_share_of_ordered_pairs_with_ties_half(pairs):
    positive = [score for score, label in pairs if label]
    negative = [score for score, label in pairs if not label]
    wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    score, label = zip(*pairs, strict=True)
    assert auroc(score, label) == pytest.approx(np.mean(wins))


def test_auroc_of_one_kind_of_label_is_not_a_number():
    assert np.isnan(auroc([0.2, 0.4], [1, 1]))


def test_auroc_keeps_scores_apart_that_single_precision_cannot():
    close = [0.5, np.nextafter(0.5, 1)]
    assert auroc(close, [0, 1]) == 1.0


def test_brier_is_the_mean_squared_distance():
    assert brier([0.5, 1.0], [1, 1]) == pytest.approx(0.125)


@pytest.mark.parametrize("measure", [expected_calibration_error, auroc, brier])
def test_samples_that_do_not_belong_together_are_refused(measure):
    with pytest.raises(ValueError, match="no sample"):
        measure([], [])
    with pytest.raises(ValueError, match=r"\(2,\), labels \(3,\)"):
        measure([0.1, 0.2], [0, 1, 1])
    with pytest.raises(ValueError, match="labels must be 0 or 1, found"):
        measure([0.1, 0.2], [0, 2])


def test_values_that_are_no_probabilities_are_refused():
    with pytest.raises(ValueError, match=r"found -1 to 0\.5 and 0 NaN"):
        expected_calibration_error([-1.0, 0.5], [0, 1])
    with pytest.raises(ValueError, match="1 NaN"):
        auroc([np.nan, 0.5], [0, 1])
    with pytest.raises(ValueError, match="bins is 0"):
        reliability_bins([0.5], [1], bins=0)
