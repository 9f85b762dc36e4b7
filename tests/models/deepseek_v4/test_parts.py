"""The parts of the decoder against their definitions, written out in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.deepseek_rope import Yarn, frequencies, rotate_tail
from dspark_jax.models.deepseek_v4 import entries, hyper_connections, ring
from dspark_jax.models.deepseek_v4.batch import locate_rows
from dspark_jax.models.deepseek_v4.compressor import compress
from dspark_jax.models.deepseek_v4.moe import moe, route
from dspark_jax.models.deepseek_v4.plan import make_plan
from dspark_jax.models.deepseek_v4.rope import phases
from dspark_jax.models.deepseek_v4.weights import HyperConnection
from dspark_jax.models.experts import expert
from dspark_jax.models.ragged import rectangle

RANDOM = np.random.default_rng(5)
routes = jax.jit(route, static_argnums=0)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def test_yarn_leaves_the_first_waves_of_v4_and_stretches_the_last_sixteenfold():
    plain = frequencies(64, 160_000.0, None)
    stretched = frequencies(64, 160_000.0, Yarn(16.0, 65_536, 32.0, 1.0))
    np.testing.assert_allclose(plain, 160_000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    np.testing.assert_allclose(stretched[:16], plain[:16], rtol=1e-6)
    np.testing.assert_allclose(stretched[25:], plain[25:] / 16, rtol=1e-6)
    assert (np.diff((plain / stretched)[15:26]) > 0).all()


def test_rotation_turns_neighbouring_pairs_at_the_tail_and_inverse_undoes_it(toy):
    x, position = normal(1, 16), jnp.array([7])

    @functools.partial(jax.jit, static_argnums=1)
    def turn(x, inverse):
        return rotate_tail(x, phases(toy.config, position, compressed=False), inverse=inverse)

    turned = turn(x, False)
    np.testing.assert_array_equal(turned[:, :12], x[:, :12])
    for pair, angle in enumerate(7 * frequencies(4, 100.0, None)):
        whole = complex(x[0, 12 + 2 * pair], x[0, 13 + 2 * pair]) * np.exp(1j * angle)
        np.testing.assert_allclose(
            turned[0, 12 + 2 * pair : 14 + 2 * pair], [whole.real, whole.imag], atol=1e-5
        )
    np.testing.assert_allclose(turn(turned, True), x, atol=1e-6)


def test_streams_are_mixed_by_a_doubly_stochastic_matrix_applied_transposed(toy):
    config = dataclasses.replace(toy.config, hc_mult=4, hc_sinkhorn_iters=20)
    n, width = 4, 6
    mix = HyperConnection(fn=normal(24, n * width), base=normal(24), scale=normal(3))
    streams = normal(1, n, width)
    out = normal(1, width)

    @jax.jit
    def through(mix, streams, out):
        seen, gates = hyper_connections.read(config, mix, streams)
        return seen, hyper_connections.write(gates, streams, out)

    seen, found = through(mix, streams, out)

    flat = np.asarray(streams).reshape(-1)
    m = np.asarray(mix.fn) @ flat / np.sqrt(np.mean(flat**2) + 1e-6)
    scale, base = np.asarray(mix.scale), np.asarray(mix.base)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    pre = sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
    post = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
    c = np.exp((m[8:] * scale[2] + base[8:]).reshape(4, 4))
    c = c / c.sum(axis=1, keepdims=True) + 1e-6
    c = c / (c.sum(axis=0) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(axis=1, keepdims=True) + 1e-6)
        c = c / (c.sum(axis=0) + 1e-6)
    np.testing.assert_allclose(c.sum(axis=0), 1, atol=1e-4)
    np.testing.assert_allclose(c.sum(axis=1), 1, atol=1e-2)
    x = np.asarray(streams)[0]
    np.testing.assert_allclose(seen[0], pre @ x, atol=1e-5)
    wanted = post[:, None] * np.asarray(out)[0] + c.T @ x
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)


@pytest.mark.parametrize(("layer", "ratio"), [(0, 4), (1, 8)])
def test_an_entry_pools_its_tokens_and_where_windows_overlap_those_before(toy, layer, ratio):
    """Softmax over tokens, channel by channel; the first CSA entry has no window before it."""
    weights = toy.weights.layers[layer].attention.compressor
    length, width = 20, toy.config.head_dim
    x = normal(length, toy.config.hidden_size)
    cache = toy.cache(1)
    packed = rectangle(jnp.zeros((1, length), jnp.int32), jnp.zeros(1, jnp.int32), np.array([20]))

    @jax.jit
    def run(cache, packed, x):
        plan = make_plan(toy.config, cache, locate_rows(packed, 1))
        return compress(toy.config, weights, cache.layers[layer].compressed, plan, x)

    written = run(cache, packed, x)
    c, z = np.asarray(x @ weights.kv.T), np.asarray(x @ weights.gate.T)
    z = z + np.asarray(weights.ape)[np.arange(length) % ratio]
    found = np.asarray(written.entries).reshape(-1, width)
    pooled = np.zeros((length // ratio, width), np.float32)
    for entry in range(length // ratio):
        own = slice(entry * ratio, (entry + 1) * ratio)
        if ratio == 4:
            value, gate = c[own, width:], z[own, width:]
            if entry:
                before = slice(own.start - 4, own.start)
                value = np.concatenate([c[before, :width], value])
                gate = np.concatenate([z[before, :width], gate])
        else:
            value, gate = c[own], z[own]
        share = np.exp(gate - gate.max(axis=0))
        pooled[entry] = (share / share.sum(axis=0) * value).sum(axis=0)
    scale = np.sqrt(np.mean(pooled**2, axis=1, keepdims=True) + 1e-6)

    @jax.jit
    def turned(rows, position):
        return rotate_tail(rows, phases(toy.config, position, compressed=True))

    normed = pooled / scale * np.asarray(weights.norm)
    wanted = turned(normed, np.arange(0, len(pooled) * ratio, ratio))
    np.testing.assert_allclose(found[: len(pooled)], wanted, atol=1e-5)
    # nothing is written for a window that has not closed
    assert (found[length // ratio :] == 0).all()


def test_the_window_that_closes_at_a_token_is_seen_by_it():
    position = jnp.array([-1, 0, 2, 3, 4, 6, 7, 8])
    np.testing.assert_array_equal(entries.visible(position, 4), [0, 0, 0, 1, 1, 1, 2, 2])


def test_a_batch_closes_every_entry_whose_last_token_it_holds():
    packed = rectangle(
        jnp.zeros((3, 6), jnp.int32), jnp.array([2, 7, 8]), jnp.array([6, 5, 0]), jnp.arange(3)
    )
    closing = jax.jit(lambda packed: entries.closing(locate_rows(packed, 3).parts[0], 4))
    entry, last = closing(packed)
    assert {*np.asarray(entry[0])} - {-1} == {0, 1}
    assert {*np.asarray(entry[1])} - {-1} == {1, 2}
    assert (np.asarray(entry[2]) == -1).all()
    assert sorted(np.asarray(last[1])) == [7, 11]


def test_hash_layers_choose_by_token_and_weigh_by_score(toy):
    weights, x = toy.weights.layers[0].moe, normal(5, toy.config.hidden_size)
    tokens = jnp.array([3, 3, 9, 0, 63])
    ids, weight = routes(toy.config, weights, x, tokens)
    np.testing.assert_array_equal(ids, weights.expert_of_token[tokens])
    scores = np.sqrt(np.log1p(np.exp(np.asarray(x @ weights.router.T))))
    chosen = np.take_along_axis(scores, np.asarray(ids), axis=1)
    np.testing.assert_allclose(weight, 1.5 * chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-5)


def test_an_expert_that_a_hash_layer_names_twice_has_two_shares(toy):
    """The sum that normalises goes over the table's entries, as in DeepSeek's equation."""
    weights, x = toy.weights.layers[0].moe, normal(1, toy.config.hidden_size)
    table = weights.expert_of_token.at[9].set(jnp.array([2, 2]))
    twice = weights.replace(expert_of_token=table)
    ids, weight = routes(toy.config, twice, x, jnp.array([9]))
    np.testing.assert_array_equal(ids, [[2, 2]])
    np.testing.assert_allclose(weight, [[0.75, 0.75]], rtol=1e-5)
    limit, experts = toy.config.swiglu_limit, jax.device_get(weights.experts)
    alone = jax.jit(expert)
    one = alone(x, experts.gate_up[2], experts.down[2], limit)
    shared = alone(x, weights.shared_gate_up, weights.shared_down, limit)
    run = jax.jit(moe, static_argnums=0)
    found = run(toy.config, twice, x, jnp.array([9]), jnp.array([True]))
    np.testing.assert_allclose(found, 1.5 * one + shared, atol=1e-5)


def test_the_bias_decides_who_is_chosen_and_not_how_much_it_weighs(toy):
    weights, x = toy.weights.layers[1].moe, normal(5, toy.config.hidden_size)
    biased = weights.replace(bias=jnp.array([-90.0, 90.0, -90.0, 50.0]))
    ids, weight = routes(toy.config, biased, x, np.zeros(5, np.int32))
    np.testing.assert_array_equal(ids, [[1, 3]] * 5)
    scores = np.sqrt(np.log1p(np.exp(np.asarray(x @ weights.router.T))))[:, [1, 3]]
    np.testing.assert_allclose(weight, 1.5 * scores / scores.sum(axis=1, keepdims=True), rtol=1e-5)


def test_the_shared_expert_is_clipped_like_the_routed_ones(toy):
    """DeepSeek's code; transformers leaves the shared expert unclipped."""
    weights, x = toy.weights.layers[1].moe, 3 * normal(4, toy.config.hidden_size)
    limit = toy.config.swiglu_limit
    one, experts = jax.jit(expert), weights.experts
    clipped, free = (
        one(x, weights.shared_gate_up, weights.shared_down, bound) for bound in (limit, None)
    )
    assert np.abs(clipped - free).max() > 0.1
    ids, weight = routes(toy.config, weights, x, np.zeros(4, np.int32))
    gate_up, down = np.asarray(experts.gate_up), np.asarray(experts.down)

    def routed(token):
        row = x[token : token + 1]
        return sum(
            share * np.asarray(one(row, gate_up[chosen], down[chosen], limit))[0]
            for chosen, share in zip(np.asarray(ids)[token], np.asarray(weight)[token], strict=True)
        )

    real = jnp.array([True] * 3 + [False])
    found = jax.jit(moe, static_argnums=0)(toy.config, weights, x, jnp.zeros(4, jnp.int32), real)
    for token in range(3):
        np.testing.assert_allclose(found[token], routed(token) + clipped[token], atol=1e-5)
    # a padding row is sent to no expert
    np.testing.assert_allclose(found[3], clipped[3], atol=1e-5)


def test_a_ring_is_read_by_position_and_has_nothing_before_the_first():
    packed = rectangle(jnp.zeros((2, 4), jnp.int32), jnp.array([30, 0]), jnp.array([4, 2]))
    table = jnp.array([[1], [-1]])
    places = jax.jit(lambda packed: ring.places(table, locate_rows(packed, 2), 2, 3))(packed)
    length = 3 + ring.SCRATCH
    request = jnp.array([0, 0, 0, 1, 2])
    position = jnp.array([0, length + 2, -1, 1, 5])
    (reading,) = places.reading
    np.testing.assert_array_equal(reading.rows(request, position), [length, length + 2, -1, -1, -1])
    np.testing.assert_array_equal(places.write[1][:4], np.arange(30, 34) % length)
    # the second request has no ring, and its last two rows are padding
    assert (places.write[0][:4] == 1).all()
    assert (places.write[0][4:] > 2).all()


def test_of_a_batch_that_laps_its_ring_only_the_last_rows_are_written():
    """Which of two writes to one row comes last is nobody's promise."""
    length, rows = 3 + ring.SCRATCH, 24
    packed = rectangle(jnp.zeros((1, rows), jnp.int32), jnp.array([5]), jnp.array([rows - 1]))
    table = jnp.array([[0]])
    places = jax.jit(lambda packed: ring.places(table, locate_rows(packed, 1), 1, 3))(packed)
    written = np.asarray(places.write[0]) == 0
    np.testing.assert_array_equal(np.flatnonzero(written), np.arange(rows - 1 - length, rows - 1))
    assert len(set(np.asarray(places.write[1])[written].tolist())) == length
