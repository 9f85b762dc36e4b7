"""Routing and grouped experts against the sum written out token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.experts import (
    Experts,
    choose_experts,
    expert,
    routed_experts,
    weigh_experts,
)
from pallas_kernels.block_linear import reference

NUMBER, WIDTH, INNER, EACH = 6, 16, 8, 2
RANDOM = np.random.default_rng(0)


def normal(*shape):
    # made on the host, where no shape is a program to compile
    return jax.device_put(RANDOM.normal(size=shape).astype(np.float32))


EXPERTS = Experts(normal(NUMBER, 2 * INNER, WIDTH), normal(NUMBER, WIDTH, INNER))
run = jax.jit(routed_experts, static_argnames="limit")


@pytest.fixture
def beside(monkeypatch):
    """Blocks beside each other, with pure JAX in the kernel's place."""
    monkeypatch.setattr("dspark_jax.models.experts.block_products.obstacle", lambda *_: None)
    monkeypatch.setattr("dspark_jax.models.experts.block_linear", in_pure_jax)
    blocks = functools.partial(routed_experts, implementation="triton")
    return jax.jit(blocks, static_argnames="limit")


def one_by_one(x, ids, weights, limit=None):
    x, ids, weights, gate_up, down = (
        np.asarray(values, np.float64)
        for values in (x, ids, weights, EXPERTS.gate_up, EXPERTS.down)
    )
    total = np.zeros(x.shape)
    for token, index in np.ndindex(ids.shape):
        number = int(ids[token, index])
        if 0 <= number < NUMBER:
            gate, up = np.split(gate_up[number] @ x[token], 2)
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            total[token] += weights[token, index] * (down[number] @ (silu(gate) * up))
    return total


def silu(x):
    return x / (1 + np.exp(-x))


def skewed(tokens):
    """All tokens share expert 4, so that its rows fill several blocks; nobody takes expert 2."""
    other = RANDOM.choice([0, 1, 3, 5], tokens)
    return jax.device_put(np.stack([np.full(tokens, 4), other], axis=1).astype(np.int32))


@pytest.mark.parametrize(("tokens", "limit"), [(1, None), (3, None), (40, None), (40, 0.5)])
def test_blocks_give_the_sum_over_each_tokens_experts(tokens, limit):
    x, ids, weights = normal(tokens, WIDTH), skewed(tokens), normal(tokens, EACH)
    found = run(x, ids, weights, EXPERTS, limit=limit)
    np.testing.assert_allclose(found, one_by_one(x, ids, weights, limit), atol=1e-4)


def test_expert_ids_outside_the_table_add_nothing():
    x, weights = normal(3, WIDTH), normal(3, EACH)
    ids = jnp.array([[4, NUMBER], [-1, 0], [NUMBER, -1]])
    found = run(x, ids, weights, EXPERTS)
    np.testing.assert_allclose(found, one_by_one(x, ids, weights), atol=1e-4)
    np.testing.assert_array_equal(found[2], 0)


def test_an_expert_named_twice_counts_twice(beside):
    """As a table over token ids may; its block then holds more rows than there are tokens."""
    x, weights = normal(5, WIDTH), normal(5, 4)
    ids = jnp.array([[4, 4, 4, 4], [4, 1, 4, 1], [0, 4, 4, 5], [3, 3, 0, 0], [4, 4, 4, -1]])
    for blocks in (run, beside):
        found = blocks(x, ids, weights, EXPERTS)
        np.testing.assert_allclose(found, one_by_one(x, ids, weights), atol=1e-4)


def test_bf16_stays_bf16_and_is_summed_in_fp32():
    x, ids, weights = normal(9, WIDTH), skewed(9), normal(9, EACH)
    found = run(x.astype(jnp.bfloat16), ids, weights, jax.tree.map(narrow, EXPERTS))
    assert found.dtype == jnp.bfloat16
    wanted = one_by_one(x, ids, weights)
    assert np.abs(np.asarray(found, float) - wanted).max() < 0.03 * np.abs(wanted).max()


def narrow(values):
    return values.astype(jnp.bfloat16)


@pytest.mark.parametrize(("tokens", "limit"), [(3, None), (40, 0.5)])
def test_blocks_beside_each_other_give_what_they_give_one_after_another(beside, tokens, limit):
    x, ids, weights = normal(tokens, WIDTH), skewed(tokens), normal(tokens, EACH)
    ids = ids.at[0].set(jnp.array([-1, NUMBER]))
    found = beside(x, ids, weights, EXPERTS, limit=limit)
    np.testing.assert_allclose(found, one_by_one(x, ids, weights, limit), atol=1e-4)
    np.testing.assert_array_equal(found[0], 0)


def in_pure_jax(x, row, matrices, owner, implementation):
    """The products, and what a kernel may leave in blocks without an owner."""
    out = reference.block_linear(x, row, matrices, owner)
    return jnp.where((owner < matrices.shape[0])[:, None, None], out, jnp.nan)


def test_blocks_run_one_after_another_unless_asked_and_able():
    x, ids, weights = normal(3, WIDTH), skewed(3), normal(3, EACH)
    with pytest.raises(NotImplementedError, match="routed_experts cannot run"):
        routed_experts(x, ids, weights, EXPERTS, implementation="triton")


def test_a_gradient_passes_through_the_blocks():
    """As through the sum over all experts, most of them weighed by 0."""
    x, ids, weights = normal(5, WIDTH), skewed(5), normal(5, EACH)

    def dense(experts, x):
        every = jax.vmap(lambda gate_up, down: expert(x, gate_up, down))
        share = (weights[..., None] * jax.nn.one_hot(ids, NUMBER)).sum(axis=1)
        return jnp.einsum("xtd,tx->td", every(experts.gate_up, experts.down), share)

    def blocks(experts, x):
        return routed_experts(x, ids, weights, experts)

    @jax.jit
    def gradients(experts, x):
        square = [lambda *a, f=f: (f(*a) ** 2).sum() for f in (blocks, dense)]
        return [jax.grad(f, argnums=(0, 1))(experts, x) for f in square]

    found, wanted = gradients(EXPERTS, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, wanted)


def test_memory_does_not_grow_with_the_number_of_experts_times_tokens():
    """64 tokens among 256 experts: less scratch than one number for each of their pairs and D."""
    tokens, number, width = 64, 256, 128
    abstract = [
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((tokens, 8), jnp.int32),
        jax.ShapeDtypeStruct((tokens, 8), jnp.float32),
        Experts(
            jax.ShapeDtypeStruct((number, 2 * INNER, width), jnp.float32),
            jax.ShapeDtypeStruct((number, width, INNER), jnp.float32),
        ),
    ]
    memory = jax.jit(routed_experts).lower(*abstract).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * number * width * 4 / 8


def test_the_bias_chooses_and_does_not_weigh():
    scores = jnp.array([[0.9, 0.1, 0.5, 0.2, 0.3, 0.4]])
    bias = jnp.array([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    ids = choose_experts(scores, bias, 2)
    np.testing.assert_array_equal(ids, [[1, 2]])
    np.testing.assert_allclose(weigh_experts(scores, ids, 2.5), [[2.5 * 1 / 6, 2.5 * 5 / 6]], 1e-6)


def test_only_experts_of_the_best_groups_are_chosen():
    """Groups of two: the best single expert (5) loses to a group whose pair is better."""
    scores = jnp.array([[0.6, 0.7, 0.1, 0.2, 0.0, 0.9]])
    chosen = choose_experts(scores, jnp.zeros(6), 2, groups=3, kept_groups=1)
    np.testing.assert_array_equal(chosen, [[1, 0]])


def test_a_group_of_negative_scores_still_beats_what_is_masked():
    """Masked experts are out of the race; a score of 0 for them would win it."""
    bias = jnp.full(6, -2.0)
    chosen = choose_experts(jnp.full((1, 6), 0.5), bias, 2, groups=3, kept_groups=1)
    np.testing.assert_array_equal(chosen, [[0, 1]])
