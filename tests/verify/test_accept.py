"""The rule of acceptance and the token that follows it, on rows small enough to work out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.ragged import compact, rectangle
from dspark_jax.verify import accept
from dspark_jax.verify.accept import Sampling
from pallas_kernels.best_linear import best_token

RUNS = 20_000


@functools.partial(jax.jit, static_argnames="filtered")
def accepted_prefix(logits, *rest, filtered):
    return accept.accepted_prefix(logits, best_token(logits), *rest, filtered=filtered)


@functools.partial(jax.jit, static_argnames="filtered")
def final_token(logits, *rest, filtered):
    return accept.final_token(logits, best_token(logits), *rest, filtered=filtered)


def sampling(count=RUNS, temperature=1.0, top_k=0, top_p=1.0):
    return Sampling(
        jnp.full(count, temperature, jnp.float32),
        jnp.full(count, top_k, jnp.int32),
        jnp.full(count, top_p, jnp.float32),
    )


def one_draft(p, draft, q, *, seed=0, **params):
    """Accept or reject one draft in many requests, then the final token of each.

    ``p`` holds target logits, ``q`` what the draft was drawn from; ``draft`` None draws it.
    """
    p, q = (jnp.asarray(row, jnp.float32) for row in (p, q))
    accepted, first = _one_draft(p, draft, q, jax.random.split(jax.random.key(seed), 3), **params)
    return np.asarray(accepted), np.asarray(first)


@functools.partial(jax.jit, static_argnames=("filtered",))
def _one_draft(p, draft, q, keys, *, filtered=False, **params):
    own = sampling(RUNS, **params)
    logits = jnp.broadcast_to(p, (RUNS, 2, len(p)))
    scores = jnp.broadcast_to(q, (RUNS, len(q)))
    drafts = (
        jax.random.categorical(keys[0], scores)[:, None]
        if draft is None
        else jnp.full((RUNS, 1), draft)
    ).astype(jnp.int32)
    packed = rectangle(
        jnp.zeros((RUNS, 2), jnp.int32), jnp.zeros(RUNS, jnp.int32), jnp.full(RUNS, 2)
    )
    accepted = accepted_prefix(
        logits.reshape(-1, len(p)),
        packed,
        drafts,
        jnp.take_along_axis(jax.nn.log_softmax(scores), drafts, axis=1),
        jax.random.uniform(keys[1], (RUNS, 1)),
        own,
        jnp.ones(RUNS, jnp.int32),
        filtered=filtered,
    )
    last = final_token(
        logits[:, 0],
        scores,
        None,
        accepted < 1,
        jax.random.gumbel(keys[2], (RUNS, len(p))),
        own,
        filtered=filtered,
    )
    return accepted, jnp.where(accepted == 1, drafts[:, 0], last)


def shares(tokens, size):
    return np.bincount(tokens, minlength=size) / len(tokens)


def test_a_draft_from_the_targets_own_distribution_is_always_accepted():
    """Rejection sampling; a rule that compares draft and target sample would accept half."""
    accepted, first = one_draft([0.0, 0.0], None, [0.0, 0.0])
    assert accepted.all()
    assert abs(shares(first, 2)[0] - 0.5) < 0.02


def test_temperature_applies_to_target_and_draft_alike():
    logits = np.asarray([1.0, 0.2, -0.7, 0.4])
    accepted, _ = one_draft(logits, None, logits / 0.5, temperature=0.5)
    assert accepted.all()
    cold, _ = one_draft(logits, None, logits, temperature=0.5)
    assert not cold.all()


def test_a_rejection_emits_from_what_the_target_has_in_excess():
    """p = (.6, .3, .1), q = (.2, .5, .3): accepted mass .6, and only token 0 is left over."""
    p, q = np.log([0.6, 0.3, 0.1]), np.log([0.2, 0.5, 0.3])
    accepted, first = one_draft(p, None, q)
    assert abs(accepted.mean() - 0.6) < 0.02
    assert (first[accepted == 0] == 0).all()
    np.testing.assert_allclose(shares(first, 3), [0.6, 0.3, 0.1], atol=0.02)


def test_tokens_outside_top_k_are_never_accepted_nor_emitted():
    p = [2.0, 1.0, 0.0, -1.0]
    accepted, first = one_draft(p, 2, [0.0, 0.0, 5.0, 0.0], top_k=2, filtered=True)
    assert not accepted.any()
    accepted, first = one_draft(p, None, [0.0, 0.0, 1.0, 0.0], top_k=2, filtered=True)
    np.testing.assert_allclose(shares(first, 4), [0.731, 0.269, 0.0, 0.0], atol=0.02)
    assert first.max() == 1


def test_a_greedy_request_accepts_the_best_token_only_whatever_the_noise():
    for seed in range(3):
        accepted, first = one_draft([1.0, 1.1], 0, [9.0, 0.0], seed=seed, temperature=0.0)
        assert not accepted.any()
        assert (first == 1).all()
        accepted, _ = one_draft([1.0, 1.1], 1, [9.0, 0.0], seed=seed, temperature=0.0)
        assert accepted.all()


def test_each_row_is_judged_with_the_parameters_of_its_own_request():
    """Idle slots stand in front; rows of the packed batch belong to later ones."""
    count = jnp.asarray([0, 2, 0, 2, 2])
    packed = compact(jnp.zeros((5, 2), jnp.int32), jnp.zeros(5, jnp.int32), count, 8)
    logits = jnp.tile(jnp.asarray([[1.0, 0.0]]), (8, 1))
    own = Sampling(
        jnp.asarray([9.0, 0.0, 9.0, 1.0, 0.01]),
        jnp.zeros(5, jnp.int32),
        jnp.ones(5),
    )
    # token 1: never for the greedy request, p/q = .27/.5 at temperature 1, nothing at .01
    accepted = accepted_prefix(
        logits,
        packed,
        jnp.ones((5, 1), jnp.int32),
        jnp.log(jnp.full((5, 1), 0.5)),
        jnp.full((5, 1), 0.5),
        own,
        jnp.maximum(count - 1, 0),
        filtered=False,
    )
    assert accepted.tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("verified", [0, 1, 2, 3])
def test_nothing_beyond_the_verified_drafts_is_accepted(verified):
    count = jnp.asarray([verified + 1])
    drafts = jnp.zeros((1, 3), jnp.int32)
    packed = compact(jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32), count, 4)
    accepted = accepted_prefix(
        jnp.tile(jnp.asarray([[1.0, 0.0]]), (4, 1)),
        packed,
        drafts,
        None,
        None,
        sampling(1, temperature=0.0),
        count - 1,
        filtered=False,
    )
    assert accepted.tolist() == [verified]


def test_equal_distributions_that_reject_by_rounding_still_emit_from_the_target():
    logits = jnp.asarray([[0.3, -0.2, 0.9]])
    token = final_token(
        logits,
        logits,
        None,
        jnp.asarray([True]),
        jnp.zeros((1, 3)),
        sampling(1),
        filtered=False,
    )
    assert token.tolist() == [2]


def test_the_residual_of_a_pruned_draft_vocabulary_is_taken_at_target_ids():
    """The drafter knows target tokens 1 and 3 alone; q = (.9, .1) there, p is even."""
    tokens = final_token(
        jnp.zeros((RUNS, 4)),
        jnp.tile(jnp.log(jnp.asarray([[0.9, 0.1]])), (RUNS, 1)),
        jnp.asarray([1, 3]),
        jnp.ones(RUNS, bool),
        jax.random.gumbel(jax.random.key(0), (RUNS, 4)),
        sampling(),
        filtered=False,
    )
    np.testing.assert_allclose(
        shares(tokens, 4), [0.25, 0, 0.25, 0.15] / np.float64(0.65), atol=0.02
    )
