"""Drafts are drawn from the very array that acceptance divides by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from dspark_jax.decode import noise
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.draft import draft
from dspark_jax.decode.state import init_state, make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.drafter import dspark
from dspark_jax.testing import markov

SLOTS, VOCAB = 20_000, 4


@functools.partial(jax.jit, static_argnames="cap")
def drafts(logits, temperature, cap=2):
    """Drafts of many requests from one table."""
    table = jnp.tile(jnp.asarray(logits, jnp.bfloat16), (VOCAB, 1))
    config = StepConfig(
        markov.MarkovTargetConfig(VOCAB), markov.MarkovDrafterConfig(VOCAB, 3), "static"
    )
    weights = Weights(
        markov.MarkovTargetWeights(table), markov.MarkovDrafterWeights(table, jnp.zeros((3, VOCAB)))
    )
    state = init_state(config, slots=SLOTS, capacity=8, max_tokens=8, dtype=jnp.float32)
    requests = make_requests(SLOTS, temperature=temperature, max_new_tokens=8, context=8)
    state = state.replace(requests=requests)
    keys = noise.step_keys(requests.seed, state.steps)
    return draft(weights, state, keys, cap, config=config)


def test_drafts_of_bf16_logits_follow_the_fp32_scores_that_are_handed_on():
    found = drafts([0.0, 0.0078, 0.0156, -0.5], 1.0)
    assert found.scores.dtype == jnp.float32
    shares = np.asarray(jax.nn.softmax(found.scores[0, 0]), np.float64)
    for position in (0, 1):
        observed = np.bincount(found.tokens[:, position], minlength=VOCAB)
        expected = SLOTS * shares / shares.sum()
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert special.chdtrc(VOCAB - 1, statistic) > 1e-3
    chosen = jnp.take_along_axis(found.scores, found.tokens[..., None], axis=-1)[..., 0]
    wanted = chosen - jax.nn.logsumexp(found.scores, axis=-1)
    np.testing.assert_array_equal(found.logprob[:, :2], wanted[:, :2])


def test_positions_and_requests_have_noise_of_their_own():
    tokens = np.asarray(drafts([0.0] * VOCAB, 1.0).tokens)
    assert abs((tokens[:, 0] == tokens[:, 1]).mean() - 0.25) < 0.02
    assert abs((tokens[:-1, 0] == tokens[1:, 0]).mean() - 0.25) < 0.02


def test_a_greedy_request_drafts_the_best_token_beside_sampled_ones():
    temperature = jnp.where(jnp.arange(SLOTS) % 2 == 0, 0.0, 1.0)
    tokens = np.asarray(drafts([0.0, 0.3, 0.2, 0.1], temperature).tokens[:, :2])
    assert (tokens[::2] == 1).all()
    assert 0.2 < (tokens[1::2] == 1).mean() < 0.4


def test_positions_past_the_cap_are_not_drafted():
    found = drafts([0.0] * VOCAB, 1.0, cap=2)
    assert not found.tokens[:, 2].any()
    assert not found.confidence[:, 2].any()


def test_greedy_drafts_are_the_same_where_no_logits_are_written(make_pair, monkeypatch):
    pair = make_pair()
    config = StepConfig(pair.target, pair.drafter, "static", sampled=False, filtered=False)
    state = init_state(config, slots=5, capacity=8, max_tokens=8, dtype=jnp.float32)
    state = state.replace(anchor=jnp.arange(5, dtype=jnp.int32))
    run = functools.partial(draft.__wrapped__, pair.weights, state, None, 3, config=config)
    plain = jax.jit(run)()
    monkeypatch.setattr(dspark, "walks_without_logits", lambda *_: True)
    monkeypatch.delattr(dspark, "base_logits")
    silent = jax.jit(lambda: run())()
    assert len(np.unique(plain.tokens[:, :3])) > 5
    np.testing.assert_array_equal(silent.tokens, plain.tokens)
    np.testing.assert_array_equal(silent.confidence, plain.confidence)
    assert silent.scores is None
