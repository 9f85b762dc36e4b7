"""The decoder as a whole: what it says does not depend on how rows are batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.deepseek_v4 import cache as cache_module
from dspark_jax.models.deepseek_v4 import model
from dspark_jax.models.ragged import rectangle

TOLERANCE = 1e-4


def largest_error(found, wanted):
    return np.max(np.abs(np.asarray(found) - np.asarray(wanted)), initial=0.0)


def in_windows(toy, texts, cache, width=8):
    """Logits of whole texts, ``width`` rows at a time."""
    found, start = [], np.zeros(2, np.int32)
    for begin in range(0, texts.shape[1], width):
        count = np.full(2, width, np.int32)
        window = np.pad(texts[:, begin : begin + width], ((0, 0), (0, 8 - width)))
        logits, cache = toy.verify(cache, window, start, count)
        found.append(logits[:, :width])
        start = start + count
        cache = model.commit(toy.config, cache, jnp.asarray(start))
    return np.concatenate(found, axis=1)


def test_a_wide_prefill_says_what_decoding_token_by_token_says(toy, texts, wanted):
    """Also the second half, which reads what the first half left in the rings."""
    first, second = texts[:, :24], texts[:, 24:]
    assert first.shape[1] > toy.config.verify_rows
    logits, cache = toy.prefill(first, toy.cache(2))
    assert largest_error(logits, wanted[:, :24]) < TOLERANCE
    logits, _ = toy.prefill(second, cache, 24)
    assert largest_error(logits, wanted[:, 24:]) < TOLERANCE


def test_a_prefill_in_narrow_pieces_says_the_same(toy, texts, wanted):
    cache = toy.cache(2)
    for begin in range(0, 48, 16):
        logits, cache = toy.prefill(texts[:, begin : begin + 16], cache, begin)
        assert largest_error(logits, wanted[:, begin : begin + 16]) < TOLERANCE


def test_ragged_windows_say_the_same_whatever_shares_their_batch(toy, texts, wanted):
    """Every width from 0 to 8, requests out of step: no row depends on its neighbours."""
    cache, start = toy.cache(2), np.zeros(2, np.int32)
    for counts in [(8, 1), (0, 7), (3, 0), (5, 2), (2, 6), (7, 8), (1, 4), (6, 3), (4, 5), (8, 8)]:
        count = np.asarray(counts, np.int32)
        window = np.stack([texts[s, start[s] : start[s] + 8] for s in range(2)])
        logits, cache = toy.verify(cache, window, start, count)
        for s in range(2):
            part = wanted[s, start[s] : start[s] + count[s]]
            assert largest_error(logits[s, : count[s]], part) < TOLERANCE
        start = start + count
        cache = model.commit(toy.config, cache, jnp.asarray(start))


def test_padding_rows_are_finite_and_leave_no_trace(toy, texts, wanted):
    _, cache = toy.prefill(texts[:, :16], toy.cache(2))
    slots = np.arange(2)
    packed = toy.rectangle(texts[:, 16:32], np.array([16, 16]), np.array([0, 11]), slots)
    logits, after = toy.run(cache, packed)
    logits = np.asarray(logits).reshape(2, 16, -1)
    assert np.isfinite(logits).all()
    assert largest_error(logits[1, :11], wanted[1, 16:27]) < TOLERANCE
    # slot 0 took no rows: all of its rows are as they were
    pairs = zip(jax.tree.leaves(cache.layers), jax.tree.leaves(after.layers), strict=True)
    for before, now in pairs:
        np.testing.assert_array_equal(before[0], now[0])
        assert (before[1] != now[1]).any()


def test_a_request_without_a_slot_writes_nothing(toy, texts):
    cache = toy.cache(2)
    packed = toy.rectangle(texts[:, :16], np.zeros(2), np.array([16, 16]), np.array([2, -1]))
    logits, after = toy.run(cache, packed)
    assert np.isfinite(np.asarray(logits)).all()
    jax.tree.map(np.testing.assert_array_equal, cache, after)


def test_slots_may_come_in_any_order(toy, texts, wanted):
    packed = toy.rectangle(texts[::-1, :16], np.zeros(2), np.array([16, 16]), np.array([1, 0]))
    _, cache = toy.run(toy.cache(2), packed)
    start = np.full(2, 16, np.int32)
    cache = model.commit(toy.config, cache, jnp.asarray(start))
    logits, _ = toy.verify(cache, texts[:, 16:24], start, np.array([8, 8], np.int32))
    assert largest_error(logits, wanted[:, 16:24]) < TOLERANCE


def test_the_next_owner_of_a_slot_sees_nothing_of_the_last_one(toy, texts, wanted):
    _, cache = toy.prefill(texts[::-1, :24], toy.cache(2))
    # a request that broke leaves NaN behind
    poisoned = jax.tree.map(lambda rows: jnp.where(rows == 0, rows, jnp.nan), cache.layers)
    cache = cache.replace(layers=poisoned, length=jnp.zeros(2, jnp.int32))
    assert largest_error(in_windows(toy, texts[:, :24], cache), wanted[:, :24]) < TOLERANCE


def test_a_broken_request_does_not_reach_its_neighbour(toy, texts, wanted):
    _, cache = toy.prefill(texts[:, :16], toy.cache(2))
    broken = jax.tree.map(lambda rows: rows.at[0].set(jnp.nan), cache.layers)
    window, start = texts[:, 16:24], np.full(2, 16, np.int32)
    logits, _ = toy.verify(cache.replace(layers=broken), window, start, np.array([8, 8], np.int32))
    assert np.isnan(logits[0]).all()
    assert largest_error(logits[1], wanted[1, 16:24]) < TOLERANCE


def test_the_same_batch_gives_the_same_bits(toy, texts):
    _, cache = toy.prefill(texts[:, :16], toy.cache(2))
    window, start = texts[:, 16:24], np.full(2, 16, np.int32)
    count = np.array([5, 8], np.int32)
    first, again = (toy.verify(cache, window, start, count) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_pages_may_lie_anywhere_in_their_pools(toy, texts, wanted, monkeypatch):
    """Rings and pages of entries shuffled among others that hold garbage."""
    monkeypatch.setattr(cache_module, "PAGE_TOKENS", 16)
    cache = toy.cache(5)
    assert cache.entry_table.shape == (5, 4)
    garbage = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache.layers)
    cache = cache.replace(
        layers=garbage,
        ring_table=jnp.array([[3], [0]]),
        entry_table=jnp.array([[17, 2, 9, -1], [4, 19, 0, -1]]),
        length=jnp.zeros(2, jnp.int32),
    )
    assert largest_error(in_windows(toy, texts, cache), wanted) < TOLERANCE


def test_taps_are_the_embedding_and_the_mean_of_the_streams_after_a_layer(toy, texts):
    def taps(weights, layers):
        packed = rectangle(jnp.asarray(texts[:1, :8]), np.zeros(1, np.int32), np.array([8]))
        return model.forward(toy.config, weights, toy.cache(1), packed, taps=layers)[1]

    # what the streams of the last layer become is what the head joins
    found = np.asarray(jax.jit(taps, static_argnums=1)(toy.weights, (2, -1, 0)))
    assert found.shape == (8, 3 * toy.config.hidden_size)
    last, embedding, first = np.split(found, 3, axis=1)
    np.testing.assert_array_equal(embedding, toy.weights.embed[texts[0, :8]])
    assert largest_error(first, embedding) > 0.1
    assert largest_error(last, first) > 0.1
    with pytest.raises(ValueError, match=r"tap 3 is no layer of this model: wanted -1 .* to 2"):
        taps(toy.weights, (3,))


def test_bf16_keeps_close_to_fp32(half_toy, texts, wanted):
    cache = half_toy.cache(2)
    assert {rows.window.dtype for rows in cache.layers} == {jnp.dtype(jnp.bfloat16)}
    # what is pooled and mixed stays fp32
    assert cache.layers[1].compressed.state.dtype == jnp.float32
    assert half_toy.weights.layers[0].attention_mix.fn.dtype == jnp.float32
    found = in_windows(half_toy, texts, cache)
    assert found.dtype == np.float32
    assert 1e-4 < np.sqrt(np.mean((found - wanted) ** 2)) < 0.1 * np.std(wanted)
