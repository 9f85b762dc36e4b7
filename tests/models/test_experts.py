"""Routing and grouped experts against the sum written out token by token."""

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

NUMBER, WIDTH, INNER, EACH = 6, 16, 8, 2
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


EXPERTS = Experts(normal(NUMBER, 2 * INNER, WIDTH), normal(NUMBER, WIDTH, INNER))


def one_by_one(x, ids, weights, limit=None):
    total = np.zeros(x.shape)
    for token, chosen in enumerate(np.asarray(ids)):
        for index, number in enumerate(chosen):
            if 0 <= number < NUMBER:
                gate, up = np.split(np.asarray(EXPERTS.gate_up[number] @ x[token], float), 2)
                if limit is not None:
                    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                out = EXPERTS.down[number] @ (gate / (1 + np.exp(-gate)) * up)
                total[token] += float(weights[token, index]) * np.asarray(out, float)
    return total


def skewed(tokens):
    """All tokens share expert 4, so that its rows fill several blocks; nobody takes expert 2."""
    other = RANDOM.choice([0, 1, 3, 5], tokens)
    return jnp.asarray(np.stack([np.full(tokens, 4), other], axis=1), jnp.int32)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_blocks_give_the_sum_over_each_tokens_experts(tokens, limit):
    x, ids, weights = normal(tokens, WIDTH), skewed(tokens), normal(tokens, EACH)
    found = routed_experts(x, ids, weights, EXPERTS, limit=limit)
    np.testing.assert_allclose(found, one_by_one(x, ids, weights, limit), atol=1e-4)


def test_expert_ids_outside_the_table_add_nothing():
    x, weights = normal(3, WIDTH), normal(3, EACH)
    ids = jnp.array([[4, NUMBER], [-1, 0], [NUMBER, -1]])
    found = routed_experts(x, ids, weights, EXPERTS)
    np.testing.assert_allclose(found, one_by_one(x, ids, weights), atol=1e-4)
    np.testing.assert_array_equal(found[2], 0)


def test_a_gradient_passes_through_the_blocks():
    x, ids, weights = normal(5, WIDTH), skewed(5), normal(5, EACH)

    def plain(experts):
        return sum(
            (weights[token, index] * expert(x[token][None], experts.gate_up[e], experts.down[e]))
            ** 2
            for token, chosen in enumerate(np.asarray(ids))
            for index, e in enumerate(chosen)
        ).sum()

    def squares(experts):
        alone = [jnp.where(jnp.arange(EACH) == index, ids, -1) for index in range(EACH)]
        return sum((routed_experts(x, one, weights, experts) ** 2).sum() for one in alone)

    found, wanted = jax.grad(squares)(EXPERTS), jax.grad(plain)(EXPERTS)
    np.testing.assert_allclose(found.down, wanted.down, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.gate_up, wanted.gate_up, rtol=1e-3, atol=1e-4)


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
