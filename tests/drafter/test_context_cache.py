"""The context cache: only committed rows are written, and rounds through it are exact."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter import dspark
from dspark_jax.drafter.backbone import block_hidden_from_context, context_features, context_kv
from dspark_jax.drafter.weights import ContextCache
from dspark_jax.models.pages import PagePool

SLOTS, CAPACITY = 3, 16

commit_context = jax.jit(dspark.commit_context, static_argnums=0)
block_hidden = jax.jit(dspark.block_hidden, static_argnums=0)


def taps_of(config, rows, seed=1):
    width = len(config.target_layer_ids) * config.target_hidden_size
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=(rows, width))))


def filled(config, value):
    empty = dspark.init_context(config, SLOTS, CAPACITY, jnp.float32)
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), empty)


@functools.partial(jax.jit, static_argnums=0)
def hidden_at_once(config, weights, taps):
    """The block with anchor 2 after all of ``taps``, without a cache."""
    rows = taps.shape[0]
    features = context_features(config, weights, taps)[None]
    context = context_kv(config, weights, features, jnp.arange(rows)[None])
    tokens = jnp.full((1, 1, config.block_size), config.mask_token_id).at[..., 0].set(2)
    embedded = dspark.embed_tokens(weights, weights.embed, tokens)
    return block_hidden_from_context(config, weights, embedded, context, jnp.array([[rows]]))


def test_dropped_rows_write_nothing_even_when_they_hold_nan(make_drafter):
    drafter = make_drafter()
    cache = filled(drafter.config, 7.0)
    taps = jnp.full_like(taps_of(drafter.config, 5), jnp.nan)
    slot = jnp.array([SLOTS, -1, SLOTS + 5, 0, 1])
    position = jnp.array([0, 3, -1, CAPACITY, -1])
    after = commit_context(drafter.config, drafter.weights, cache, taps, slot, position)
    for before_leaf, after_leaf in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before_leaf, after_leaf)


def test_a_commit_touches_only_the_rows_it_names(make_drafter):
    drafter = make_drafter()
    cache = filled(drafter.config, jnp.nan)
    taps = taps_of(drafter.config, 3)
    slot, position = jnp.array([2, 0, SLOTS]), jnp.array([5, 15, 6])
    after = commit_context(drafter.config, drafter.weights, cache, taps, slot, position)
    written = np.zeros((SLOTS, CAPACITY), bool)
    written[2, 5] = written[0, 15] = True
    for leaf in jax.tree.leaves(after):
        finite = np.isfinite(leaf).all(axis=(1, 3))
        np.testing.assert_array_equal(finite, written)


def test_a_broken_request_does_not_poison_the_next_owner_of_its_slot(make_drafter):
    drafter = make_drafter()
    cache = dspark.init_context(drafter.config, SLOTS, CAPACITY, jnp.float32)
    commit = functools.partial(commit_context, drafter.config, drafter.weights)
    rows = jnp.arange(8)
    slot = jnp.zeros(8, jnp.int32)
    cache = commit(cache, jnp.full_like(taps_of(drafter.config, 8), jnp.nan), slot, rows)
    cache = commit(cache, taps_of(drafter.config, 4), slot[:4], rows[:4])
    hidden = block_hidden(
        drafter.config,
        drafter.weights,
        None,
        cache,
        jnp.array([1, 2, 3]),
        jnp.array([4, 0, 0]),
    )
    assert jnp.isfinite(hidden).all()


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5]])
def test_context_built_in_pieces_equals_context_built_at_once(make_drafter, chunks):
    drafter = make_drafter()
    config, weights = drafter.config, drafter.weights
    taps = taps_of(config, 9)
    cache = filled(config, 3.0)
    done = 0
    for size in chunks:
        rows = slice(done, done + size)
        cache = commit_context(
            config, weights, cache, taps[rows], jnp.full(size, 1), jnp.arange(done, done + size)
        )
        done += size
    hidden = block_hidden(config, weights, None, cache, jnp.array([1, 2, 3]), jnp.array([0, 9, 0]))
    wanted = hidden_at_once(config, weights, taps)
    np.testing.assert_allclose(hidden[1], wanted[0, 0], atol=2e-5)


def test_context_in_pages_equals_context_in_one(make_drafter):
    drafter = make_drafter()
    config, weights = drafter.config, drafter.weights
    pool = PagePool(count=4, size=4, columns=3)
    cache = dspark.init_context_pages(config, SLOTS, pool, jnp.float32)
    cache = cache.replace(table=jnp.array([[-1] * 3, [3, 0, 2], [-1] * 3], jnp.int32))
    taps = taps_of(config, 10)
    position = jnp.arange(10).at[9].set(12)  # past the table: written nowhere
    cache = commit_context(config, weights, cache, taps, jnp.full(10, 1), position)
    assert not any(rows[1].any() for rows in cache.keys + cache.values)
    hidden = block_hidden(config, weights, None, cache, jnp.array([1, 2, 3]), jnp.array([0, 9, 0]))
    wanted = hidden_at_once(config, weights, taps[:9])
    np.testing.assert_allclose(hidden[1], wanted[0, 0], atol=2e-5)


def test_a_donated_cache_is_written_in_place(make_drafter):
    drafter = make_drafter()

    @functools.partial(jax.jit, donate_argnums=0)
    def commit(cache: ContextCache, taps, slot, position):
        return commit_context(drafter.config, drafter.weights, cache, taps, slot, position)

    cache = dspark.init_context(drafter.config, SLOTS, CAPACITY, jnp.float32)
    rows = jnp.arange(4)
    compiled = commit.lower(cache, taps_of(drafter.config, 4), rows % SLOTS, rows).compile()
    shape = ",".join(map(str, cache.keys[0].shape))
    assert shape in (compiled.as_text() or "")
    copies = re.findall(rf"f32\[{shape}\]\S* (?:copy|transpose)\(", compiled.as_text() or "")
    assert copies == []


def test_columns_of_a_pruned_vocabulary_become_target_ids(make_drafter):
    drafter = make_drafter(draft_vocab_size=3)
    columns = jnp.array([[0, 2], [1, 1]])
    np.testing.assert_array_equal(dspark.to_target_ids(drafter.weights, columns), columns)
    pruned = drafter.weights.replace(draft_to_target=jnp.array([4, 9, 30]))
    np.testing.assert_array_equal(dspark.to_target_ids(pruned, columns), [[4, 30], [9, 9]])
