"""After any accepted prefix of any window, later logits are those of decoding token by token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.models.deepseek_v4 import ring

TOLERANCE = 1e-4
WIDTH = 8

window = st.integers(1, WIDTH).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows)))
"""Rows of a verify window, and how many of them are accepted (the anchor always is)."""


def decode(toy, texts, wanted, prompt, rounds):
    """Verify windows whose drafts are right up to the accepted prefix and junk after it."""
    junk = np.random.default_rng(len(rounds))
    cache, start = toy.cache(2), np.full(2, prompt, np.int32)
    if prompt:
        _, cache = toy.prefill(texts[:, :prompt], cache)
    for pairs in rounds:
        count, accepted = np.array(pairs, np.int32).T
        count = np.minimum(count, texts.shape[1] - start)
        accepted = np.minimum(accepted, count)
        tokens = junk.integers(0, toy.config.vocab_size, (2, WIDTH)).astype(np.int32)
        for s in range(2):
            kept = slice(start[s], start[s] + accepted[s])
            tokens[s, : accepted[s]] = texts[s, kept]
        logits, cache = toy.verify(cache, tokens, start, count)
        for s in range(2):
            kept = slice(start[s], start[s] + accepted[s])
            error = np.abs(logits[s, : accepted[s]] - wanted[s, kept]).max(initial=0.0)
            assert error < TOLERANCE, (s, start[s], count[s], accepted[s])
        start = start + accepted
        cache = toy.commit(cache, start)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    prompt=st.sampled_from([0, 24]),
    rounds=st.lists(st.tuples(window, window), min_size=4, max_size=24),
)
def test_rejected_rows_leave_no_trace(toy, texts, wanted, prompt, rounds):
    decode(toy, texts, wanted, prompt, rounds)


def test_windows_of_full_width_of_which_only_the_anchor_survives(toy, texts, wanted):
    """Every position is drafted seven times wrongly before it is reached."""
    decode(toy, texts, wanted, 0, [((8, 1), (8, 1))] * 47)


def test_the_widest_batch_that_may_be_rejected_still_leaves_its_history(toy, texts, wanted):
    rows, begin = ring.SCRATCH, 24
    _, cache = toy.prefill(texts[:, :begin], toy.cache(2))
    for length in range(begin + 1, begin + 9):
        tokens = np.zeros((2, rows), np.int32)
        tokens[:, 0] = texts[:, length - 1]
        start, count = np.full(2, length - 1), np.full(2, rows)
        _, cache = toy.verify(cache, tokens, start, count)
        # all but the first row are taken back
        cache = toy.commit(cache, np.full(2, length))
        start = np.full(2, length, np.int32)
        logits, _ = toy.verify(
            cache, texts[:, length : length + 8], start, np.array([8, 8], np.int32)
        )
        assert np.abs(logits - wanted[:, length : length + 8]).max() < TOLERANCE
