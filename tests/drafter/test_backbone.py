"""What blocks see: context before their anchor, themselves, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter.backbone import block_hidden_from_context, context_features, context_kv
from dspark_jax.drafter.dspark import embed_tokens

ROWS = 12


def taps_of(config, rows=ROWS, sequences=1, dtype=jnp.float32):
    width = len(config.target_layer_ids) * config.target_hidden_size
    return jnp.asarray(np.random.default_rng(1).normal(size=(sequences, rows, width)), dtype)


def blocks_at(drafter, taps, start, tokens=None):
    start = jnp.asarray(start)
    if tokens is None:
        tokens = jnp.full((*start.shape, drafter.config.block_size), drafter.config.mask_token_id)
    return hidden_of(drafter.config, drafter.weights, taps, start, tokens)


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(config, weights, taps, start, tokens):
    position = jnp.broadcast_to(jnp.arange(taps.shape[1]), taps.shape[:2])
    context = context_kv(config, weights, context_features(config, weights, taps), position)
    embeddings = embed_tokens(weights, weights.embed, tokens)
    return block_hidden_from_context(config, weights, embeddings, context, start)


def test_a_block_sees_the_rows_before_its_anchor_and_no_later_ones(make_drafter):
    drafter = make_drafter()
    taps = taps_of(drafter.config)
    before = blocks_at(drafter, taps, [[5]])
    later = blocks_at(drafter, taps.at[:, 5:].set(9.0), [[5]])
    earlier = blocks_at(drafter, taps.at[:, 4].set(9.0), [[5]])
    np.testing.assert_array_equal(before, later)
    assert jnp.abs(before - earlier).max() > 1e-3


def test_blocks_of_one_sequence_do_not_see_each_other(make_drafter):
    drafter = make_drafter()
    taps = taps_of(drafter.config, sequences=2)
    start = jnp.array([[0, 3, 9], [12, 3, 1]])
    together = blocks_at(drafter, taps, start)
    for a in range(3):
        alone = blocks_at(drafter, taps, start[:, a : a + 1])
        np.testing.assert_allclose(together[:, a], alone[:, 0], atol=2e-5)


def test_the_first_position_of_a_block_depends_on_its_last(make_drafter):
    drafter = make_drafter()
    taps = taps_of(drafter.config)
    tokens = jnp.array([[[1, 31, 31, 31]]])
    changed = blocks_at(drafter, taps, [[5]], tokens.at[..., -1].set(2))
    assert jnp.abs(blocks_at(drafter, taps, [[5]], tokens) - changed)[0, 0, 0].max() > 1e-4


def test_a_window_hides_the_rows_further_back_than_it(make_drafter):
    drafter = make_drafter(sliding_window=3)
    taps = taps_of(drafter.config)
    seen = blocks_at(drafter, taps, [[8]])
    np.testing.assert_array_equal(seen, blocks_at(drafter, taps.at[:, :5].set(9.0), [[8]]))
    assert jnp.abs(seen - blocks_at(drafter, taps.at[:, 5].set(9.0), [[8]])).max() > 1e-3
    full = make_drafter(sliding_window=8)
    np.testing.assert_array_equal(
        blocks_at(full, taps, [[8]]), blocks_at(make_drafter(), taps, [[8]])
    )


def test_positions_past_the_drafters_own_limit_are_rotated_like_any_other(make_drafter):
    short, long = make_drafter(max_position_embeddings=4), make_drafter()
    taps = taps_of(short.config)
    hidden = blocks_at(short, taps, [[10]])
    np.testing.assert_array_equal(hidden, blocks_at(long, taps, [[10]]))
    assert jnp.isfinite(hidden).all()


@pytest.mark.parametrize(("depth", "block_size"), [(1, 1), (2, 3), (3, 1), (4, 3), (5, 1), (6, 3)])
def test_any_depth_and_block_size_is_finite_in_bf16(make_drafter, depth, block_size):
    drafter = make_drafter(jnp.bfloat16, num_hidden_layers=depth, block_size=block_size)
    taps = taps_of(drafter.config, dtype=jnp.bfloat16)
    hidden = blocks_at(drafter, taps, [[0, 7]])
    assert hidden.shape == (1, 2, block_size, drafter.config.hidden_size)
    assert hidden.dtype == jnp.bfloat16
    assert jnp.isfinite(hidden.astype(jnp.float32)).all()
