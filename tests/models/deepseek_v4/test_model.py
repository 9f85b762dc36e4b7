"""The decoder as a whole: what it says does not depend on how rows are batched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.deepseek_v4 import model
from dspark_jax.models.layers import rms_norm
from dspark_jax.models.pages import PagePool
from dspark_jax.models.ragged import Mixed, compact

TOLERANCE = 1e-4
pack = jax.jit(compact, static_argnums=3)


def largest_error(found, wanted):
    return np.max(np.abs(np.asarray(found) - np.asarray(wanted)), initial=0.0)


def in_windows(toy, texts, cache, width=8):
    """Logits of whole texts, ``width`` rows at a time."""
    found, start = [], np.zeros(2, np.int32)
    for begin in range(0, texts.shape[1], width):
        count = np.full(2, width, np.int32)
        logits, cache = toy.verify(cache, texts[:, begin : begin + width], start, count)
        found.append(logits)
        start = start + count
        cache = toy.commit(cache, start)
    return np.concatenate(found, axis=1)


def test_a_wide_prefill_says_what_decoding_token_by_token_says(toy, texts, wanted):
    """Also the second half, which reads what the first half left in the rings."""
    first, second = texts[:, :24], texts[:, 24:]
    assert first.shape[1] > toy.config.verify_rows
    logits, cache = toy.prefill(first, toy.cache(2))
    assert largest_error(logits, wanted[:, :24]) < TOLERANCE
    logits, _ = toy.prefill(second, cache, 24)
    assert largest_error(logits, wanted[:, 24:]) < TOLERANCE


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
        cache = toy.commit(cache, start)


def test_padding_rows_are_finite_and_leave_no_trace(toy, texts, wanted):
    _, cache = toy.prefill(texts[:, :24], toy.cache(2))
    slots = np.arange(2)
    packed = toy.rectangle(texts[:, 24:], np.array([24, 24]), np.array([0, 11]), slots)
    logits, after = toy.run(cache, packed)
    logits = np.asarray(logits).reshape(2, 24, -1)
    assert np.isfinite(logits).all()
    assert largest_error(logits[1, :11], wanted[1, 24:35]) < TOLERANCE
    # slot 0 took no rows: its half of every pool is as it was
    pairs = zip(jax.tree.leaves(cache.layers), jax.tree.leaves(after.layers), strict=True)
    for before, now in pairs:
        own = before.shape[0] // 2
        np.testing.assert_array_equal(before[:own], now[:own])
        assert (before[own:] != now[own:]).any()


def test_a_batch_without_any_row_changes_nothing(toy, texts):
    _, cache = toy.prefill(texts[:, :24], toy.cache(2))
    nothing = np.zeros(2, np.int32)
    logits, after = toy.verify(cache, texts[:, 24:32], np.full(2, 24, np.int32), nothing)
    assert np.isfinite(logits).all()
    jax.tree.map(np.testing.assert_array_equal, cache, after)


def test_a_request_without_a_slot_writes_nothing(toy, texts):
    cache = toy.cache(2)
    packed = toy.rectangle(texts[:, :24], np.zeros(2), np.array([24, 24]), np.array([2, -1]))
    logits, after = toy.run(cache, packed)
    assert np.isfinite(np.asarray(logits)).all()
    jax.tree.map(np.testing.assert_array_equal, cache, after)


def test_slots_may_come_in_any_order(toy, texts, wanted):
    packed = toy.rectangle(texts[::-1, :24], np.zeros(2), np.array([24, 24]), np.array([1, 0]))
    _, cache = toy.run(toy.cache(2), packed)
    start = np.full(2, 24, np.int32)
    cache = toy.commit(cache, start)
    logits, _ = toy.verify(cache, texts[:, 24:32], start, np.array([8, 8], np.int32))
    assert largest_error(logits, wanted[:, 24:32]) < TOLERANCE


def test_the_next_owner_of_a_slot_sees_nothing_of_the_last_one(toy, texts, wanted):
    _, cache = toy.prefill(texts[::-1, :24], toy.cache(2))
    # a request that broke leaves NaN behind
    layers = jax.device_get(cache.layers)
    poisoned = jax.tree.map(lambda rows: np.where(rows == 0, rows, np.nan), layers)
    cache = cache.replace(layers=poisoned, length=np.zeros(2, np.int32))
    assert largest_error(in_windows(toy, texts[:, :24], cache), wanted[:, :24]) < TOLERANCE


def test_a_broken_request_does_not_reach_its_neighbour(toy, texts, wanted):
    _, cache = toy.prefill(texts[:, :24], toy.cache(2))
    broken = jax.tree.map(np.array, cache.layers)
    for rows in jax.tree.leaves(broken):
        rows[0] = np.nan
    window, start = texts[:, 24:32], np.full(2, 24, np.int32)
    logits, _ = toy.verify(cache.replace(layers=broken), window, start, np.array([8, 8], np.int32))
    assert np.isnan(logits[0]).all()
    assert largest_error(logits[1], wanted[1, 24:32]) < TOLERANCE


def test_the_same_batch_gives_the_same_bits(toy, texts):
    _, cache = toy.prefill(texts[:, :24], toy.cache(2))
    window, start = texts[:, 24:32], np.full(2, 24, np.int32)
    count = np.array([5, 8], np.int32)
    first, again = (toy.verify(cache, window, start, count) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_pages_may_lie_anywhere_in_their_pools(toy, texts, wanted):
    """Rings swapped and pages of entries shuffled, with garbage in all of them."""
    cache = toy.cache(2)
    assert cache.table.shape == (2, 4)
    cache = cache.replace(
        layers=jax.tree.map(lambda pool: np.full_like(pool, np.nan), cache.layers),
        ring_table=np.array([[1], [0]], np.int32),
        table=np.array([[6, 1, 3, -1], [2, 7, 0, 5]], np.int32),
    )
    assert largest_error(in_windows(toy, texts, cache), wanted) < TOLERANCE


def test_pieces_of_a_prompt_and_windows_share_a_batch(toy, texts, wanted):
    """A text in pieces that lap its rings, beside drafts, in pages smaller than an entry."""
    start = jax.jit(model.init_pages, static_argnums=(0, 1, 2, 3))
    cache = start(toy.config, 2, PagePool(40, 4, 16), jnp.float32)
    pages = np.random.default_rng(4).permutation(40)[:32].reshape(2, 16)
    cache = cache.replace(
        layers=jax.tree.map(lambda pool: np.full_like(pool, np.nan), cache.layers),
        table=pages.astype(np.int32),
    )

    def check(cache, pieces, windows):
        """Run pieces (slot, start) of 8 rows and windows (start, rows) by slot."""
        tokens = [texts[slot, start : start + 8] for slot, start in pieces]
        blank = 3 - len(pieces)
        slots, starts = np.array([*pieces, *[(2, 0)] * blank]).T
        prompts = toy.rectangle(
            np.stack(tokens + [texts[0, :8]] * blank), starts, np.where(slots < 2, 8, 0), slots
        )
        begin, count = np.array(windows, np.int32).T
        drafts = np.stack([texts[slot, at : at + 8] for slot, at in enumerate(begin)])
        verified = pack(drafts, begin, count, 16)
        logits, cache = toy.run(cache, Mixed((prompts, verified)))
        read, said = (np.asarray(part) for part in jnp.split(logits, [24]))
        for (slot, start), found in zip(pieces, read.reshape(3, 8, -1), strict=False):
            assert largest_error(found, wanted[slot, start : start + 8]) < TOLERANCE
        for slot, found in enumerate(np.asarray(verified.unpack(jnp.asarray(said)))):
            own = wanted[slot, begin[slot] : begin[slot] + count[slot]]
            assert largest_error(found[: count[slot]], own) < TOLERANCE
        return cache

    cache = check(cache, [(0, 0), (1, 0), (0, 8)], [(0, 0), (0, 0)])
    # in any order; of the window three rows are kept
    cache = check(cache, [(1, 16), (1, 8), (1, 24)], [(16, 7), (0, 0)])
    check(cache, [], [(19, 8), (32, 8)])


def test_taps_are_the_embedding_and_the_mean_of_the_streams_after_a_layer(toy, texts):
    packed = toy.rectangle(texts[:, :24], np.zeros(2), np.array([24, 24]), np.arange(2))
    # a head that weighs all streams alike joins them to a multiple of their mean
    alike = jax.tree.map(jnp.zeros_like, toy.weights.stream_head)
    even = dataclasses.replace(toy, weights=toy.weights.replace(stream_head=alike))
    logits, taps, _ = even.forward(toy.cache(2), packed)
    last, embedding, first = np.split(np.asarray(taps), 3, axis=1)
    np.testing.assert_array_equal(embedding, toy.weights.embed[texts[:, :24].reshape(-1)])
    normed = rms_norm(jnp.asarray(last), toy.weights.norm, toy.config.rms_norm_eps)
    assert largest_error(normed @ toy.weights.head.T, logits) < TOLERANCE
    assert largest_error(last, first) > 0.1
    assert largest_error(first, embedding) > 0.1
    with pytest.raises(ValueError, match=r"tap 2 is no layer of this model: wanted -1 .* to 1"):
        model.forward(toy.config, toy.weights, toy.cache(2), packed, taps=(2,))


def test_bf16_weights_give_bf16_rows_and_what_must_be_exact_stays_fp32(half_toy):
    config, weights = half_toy.config, half_toy.weights
    packed = half_toy.rectangle(np.zeros((1, 8)), np.zeros(1), np.array([8]), np.zeros(1))

    def run(weights):
        cache = half_toy.cache(1)
        hidden, taps, after = model.forward(config, weights, cache, packed, taps=(0,))
        return hidden, taps, model.unembed(config, weights, hidden), cache, after

    hidden, taps, logits, *caches = jax.eval_shape(run, weights)
    assert hidden.dtype == taps.dtype == weights.embed.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    before, after = (jax.tree.map(lambda value: value.dtype, cache) for cache in caches)
    assert before == after
    layer = after.layers[0]
    assert layer.window == layer.compressed.entries == layer.index.entries == jnp.bfloat16
    assert layer.compressed.state == layer.index.state == jnp.float32
    exact = (weights.layers[0].attention_mix, weights.layers[1].moe.router, weights.stream_head)
    assert {value.dtype for value in jax.tree.leaves(exact)} == {jnp.dtype(jnp.float32)}
