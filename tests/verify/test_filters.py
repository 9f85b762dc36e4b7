"""Top-k and top-p against a sort."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.verify.filters import filter_logits

filtered = jax.jit(filter_logits)


def apply(logits, top_k=0, top_p=1.0):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    rows = len(logits)
    return np.asarray(
        filtered(logits, np.full(rows, top_k, np.int32), np.full(rows, top_p, np.float32))
    )


def oracle(row, top_k, top_p):
    """Kept tokens, and the smallest distance of a cumulative mass to ``top_p``."""
    row = row.astype(np.float64)
    kept = np.ones(len(row), bool)
    if top_k:
        kept = row >= np.sort(row)[::-1][min(top_k, len(row)) - 1]
    if top_p >= 1.0:
        return kept, 1.0
    weight = np.where(kept, np.exp(row - row.max()), 0.0)
    weight /= weight.sum()
    above = np.array([weight[row > value].sum() for value in row])
    return kept & (above < top_p), np.abs(above - top_p).min()


# XLA takes subnormal numbers for zeros.
FLOATS = st.floats(-30, 30, width=32, allow_subnormal=False)
VALUES = st.one_of(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0]), FLOATS)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(VALUES, min_size=16, max_size=16),
    st.integers(0, 20),
    st.one_of(st.just(1.0), st.floats(0.0078125, 0.9990234375, width=32)),
)
def test_the_filters_agree_with_a_sort(values, top_k, top_p):
    row = np.array(values, np.float32)
    kept, margin = oracle(row, top_k, top_p)
    found = apply(row, top_k, top_p)[0]
    np.testing.assert_array_equal(found[np.isfinite(found)], row[np.isfinite(found)])
    assert np.isfinite(found[row.argmax()])
    if margin > 1e-5:  # nearer than that, rounding decides
        np.testing.assert_array_equal(np.isfinite(found), kept)


def test_top_k_renormalises_over_the_two_best():
    found = apply([2.0, 1.0, 0.0, -1.0], top_k=2)[0]
    np.testing.assert_allclose(jax.nn.softmax(found), [0.731, 0.269, 0, 0], atol=5e-4)


def test_top_p_counts_mass_inside_the_top_k_set():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    # Of the two best, the first holds 0.571 of their mass: 0.5 is reached by it alone.
    assert np.isfinite(apply(logits, top_k=2, top_p=0.5)).tolist() == [[True, False, False, False]]
    assert np.isfinite(apply(logits, top_p=0.5)).tolist() == [[True, True, False, False]]


def test_rows_are_filtered_by_their_own_parameters():
    logits = np.tile(np.arange(6, dtype=np.float32), (4, 1))
    found = filtered(logits, np.int32([0, 1, 3, 9]), np.float32([1, 1, 1, 1e-6]))
    assert np.isfinite(np.asarray(found)).sum(axis=1).tolist() == [6, 1, 3, 1]


def test_without_filters_the_logits_come_back_bit_for_bit():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    np.testing.assert_array_equal(apply(logits), logits)
    mixed = filtered(logits, np.int32([0, 2, 0]), np.float32([1, 1, 1]))
    np.testing.assert_array_equal(np.asarray(mixed)[[0, 2]], logits[[0, 2]])


@pytest.mark.parametrize("top_p", [1e-30, 1e-6, 0.5])
def test_the_most_likely_token_survives_any_filter(top_p):
    logits = np.array([[-1e30, 5.0, -np.inf, 4.0], [-3e38, -3.1e38, -np.inf, -np.inf]])
    found = apply(logits, top_k=1, top_p=top_p)
    assert np.isfinite(found).tolist() == [[False, True, False, False], [True, False, False, False]]


def test_equal_tokens_at_the_threshold_are_all_kept():
    assert np.isfinite(apply([1.0, 2.0, 1.0, 0.0], top_k=2)).tolist() == [[True, True, True, False]]
    assert np.isfinite(apply([0.0, -0.0, -1.0], top_k=1)).tolist() == [[True, True, False]]
