"""When two greedy answers part: tie or bug."""

import numpy as np
import pytest

from benchmarks.parting import TIE_MULTIPLE, classify, compare, first_difference


def test_the_first_difference_counts_the_end_of_the_shorter_answer():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_a_gap_within_the_noise_of_batch_shapes_is_a_tie():
    logits = np.array([[5.0, 4.9, 0.0], [5.0, 5.05, 0.0]])
    found = classify(logits, (0, 1))
    assert found.verdict == "TIE"
    assert found.gap == pytest.approx(0.1)
    assert found.noise == pytest.approx(0.15)


def test_a_gap_beyond_the_noise_is_a_bug():
    noise = 0.01
    logits = np.array([[5.0, 5.0 - (TIE_MULTIPLE + 1) * noise], [5.0, 5.0 - TIE_MULTIPLE * noise]])
    assert classify(logits, (0, 1)).verdict == "BUG"


def test_without_noise_nothing_but_equal_logits_is_a_tie():
    assert classify(np.array([[1.0, 0.9999]] * 2), (0, 1)).verdict == "BUG"
    assert classify(np.array([[1.0, 1.0]] * 2), (0, 1)).verdict == "TIE"


def test_two_close_tokens_that_are_both_far_below_the_best_are_a_bug():
    logits = np.array([[9.0, 1.0, 1.01], [9.0, 1.01, 1.0]])
    assert classify(logits, (1, 2)).verdict == "BUG"


def test_an_answer_that_stops_elsewhere_is_a_bug_without_a_look_at_logits():
    found = compare(None, [1], [2, 3], [2], batch=1, width=1, capacity=8)  # pyright: ignore
    assert (found.verdict, found.position) == ("BUG", 1)
