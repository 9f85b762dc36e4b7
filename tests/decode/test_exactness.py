"""Sampled output has the target's distribution, in every exact mode and policy; not in "fresh".

A target and a drafter that are tables over the previous token make the law of the output exact
and cheap to sample. Confidences depend strongly on drafted tokens, so that a rule which looks
at a token before deciding its fate shows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from dspark_jax.decode import loop, noise
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.state import make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing.markov import (
    MarkovDrafterConfig,
    MarkovDrafterWeights,
    MarkovTargetConfig,
    MarkovTargetWeights,
)

pytestmark = pytest.mark.optimized

VOCAB, BLOCK, SLOTS, LAG = 4, 3, 2, 1
# batches of two requests: 100 000 answers
RUNS = 50_000
# Enough where no budget looks at anything, and where what is looked for is plain.
FEW_RUNS = 10_000
# Bonferroni: every statistical test of this file shares one chance in a thousand
TESTS = 13
LEVEL = 1e-3 / TESTS
# lag + 2 steps commit at most this many tokens, so the tokens looked at are later than that
FIRST = (LAG + 2) * (BLOCK + 1)
TEMPERATURES = (0.7, 1.0)
TOP_K, TOP_P = (0, 3), (0.9, 1.0)
PROMPT = (1, 2)


def tables() -> Weights:
    """A drafter near its target, sure of itself after some tokens and hopeless after others."""
    keys = jax.random.split(jax.random.key(5), 2)
    target = 1.5 * jax.random.normal(keys[0], (VOCAB, VOCAB))
    drafter = target + 0.8 * jax.random.normal(keys[1], (VOCAB, VOCAB))
    good, bad = 4.0, -4.0
    confidence = jnp.asarray(
        [[1.4, 1.4, 1.4, 1.4], [good, bad, good, bad], [good, good, bad, bad]], jnp.float32
    )
    return Weights(MarkovTargetWeights(target), MarkovDrafterWeights(drafter, confidence))


def law(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Transition matrix with temperature, top-k and top-p, by sorting."""
    rows = []
    for row in np.asarray(logits, np.float64) / temperature:
        p = np.exp(row - row.max())
        p /= p.sum()
        order = np.argsort(-p)
        if top_k:
            p[order[top_k:]] = 0
            p /= p.sum()
        mass_before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        p[order[mass_before >= top_p]] = 0
        rows.append(p / p.sum())
    return np.stack(rows)


def pair_law(matrix: np.ndarray, start: int, index: int) -> np.ndarray:
    """Joint law of the tokens at ``index`` and ``index + 1`` of an answer."""
    at = np.linalg.matrix_power(matrix, index + 1)[start]
    return (at[:, None] * matrix).reshape(-1)


def pvalue(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square goodness of fit; cells expected fewer than 10 times are pooled into one."""
    small = expected < 10
    assert observed[expected == 0].sum() == 0, "a token outside top-k or top-p was emitted"
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    observed, expected = observed[keep], expected[keep]
    np.testing.assert_allclose(observed.sum(), expected.sum())
    # scipy.stats, which has the test, takes longer to import than most tests take
    return float(special.chdtrc(keep.sum() - 1, ((observed - expected) ** 2 / expected).sum()))


def costs(policy: str):
    """Costs under which doubtful drafts do not pay.

    A staircase, on which an argmax and an early stop part; under a staircase this steep an early
    stop never leaves the ground, so "causal" gets a slope.
    """
    plain = no_costs(SLOTS, BLOCK)
    tokens = np.arange(plain.verify.shape[1])
    slope = 1.0 + 0.35 * tokens
    stairs = np.select([tokens <= 3, tokens <= 6], [1.0, 1.6], 2.0)
    verify = jnp.asarray(slope if policy == "causal" else stairs, jnp.float32)
    return plain.replace(verify=verify[None], known=jnp.asarray(True))


MAX_TOKENS = FIRST + 3


def sample(config: StepConfig, runs: int):
    """So many independent batches of two requests, each batch with its own seeds."""

    def batch(seed):
        requests = make_requests(
            SLOTS,
            temperature=jnp.asarray(TEMPERATURES),
            top_k=jnp.asarray(TOP_K),
            top_p=jnp.asarray(TOP_P),
            seed=seed * SLOTS,
            max_new_tokens=MAX_TOKENS,
            context=64,
        )
        return loop.generate(
            tables(),
            jnp.asarray(PROMPT)[:, None],
            jnp.ones(SLOTS, jnp.int32),
            requests,
            costs(config.policy),
            config=config,
            max_tokens=MAX_TOKENS,
        )

    return in_parts(batch, runs)


# Twice as quick to compile as all optimizations, and no slower to run.
SOME_OPTIMIZATION = {"xla_backend_optimization_level": 1}


def in_parts(function, runs: int):
    """``function`` of every seed below ``runs``, so many at a time that a cache holds them."""

    def mapped(seeds):
        return jax.lax.map(function, seeds, batch_size=2000)

    mapped = jax.jit(mapped, compiler_options=SOME_OPTIMIZATION)
    return jax.tree.map(np.asarray, mapped(jnp.arange(runs)))


sample_once = functools.cache(sample)


def joint_pvalue(tokens: np.ndarray) -> float:
    """Joint law of two neighbouring tokens of both requests: requests do not see each other."""
    weights, index = tables(), FIRST + 1
    laws = [
        pair_law(law(weights.target.logits, t, k, p), start, index)
        for t, k, p, start in zip(TEMPERATURES, TOP_K, TOP_P, PROMPT, strict=True)
    ]
    expected = len(tokens) * (laws[0][:, None] * laws[1]).reshape(-1)
    pair = tokens[:, :, index] * VOCAB + tokens[:, :, index + 1]
    cell = pair[:, 0] * VOCAB**2 + pair[:, 1]
    return pvalue(np.bincount(cell, minlength=VOCAB**4).astype(float), expected)


def config(mode: str, policy: str = "lagged", **changes) -> StepConfig:
    """Walk caps where costs choose among them by lagged confidences.

    One bucket: it is chosen after the windows, and each is a program to compile.
    """
    by_costs = mode in ("compact", "cap-accept") and not changes.keys() & {"threshold", "shape"}
    return StepConfig(
        target=MarkovTargetConfig(VOCAB),
        drafter=MarkovDrafterConfig(VOCAB, BLOCK),
        mode=mode,
        policy=policy,
        lag=LAG,
        walk_caps=(1, BLOCK) if by_costs and policy == "lagged" else (),
        **changes,
    )


@pytest.mark.parametrize(
    ("mode", "policy"),
    [("compact", "lagged"), ("compact", "causal"), ("cap-accept", "lagged")],
)
def test_committed_tokens_have_the_targets_joint_distribution(mode, policy):
    # what cap-accept commits is also held against what compact commits, below
    out = sample_once(config(mode, policy), FEW_RUNS if mode == "cap-accept" else RUNS)
    step = np.arange(out.windows.shape[2])
    # a request's last steps are cut short by its token limit, not by the budget
    late = (step >= LAG + 2) & (step < out.steps[..., None] - 2)
    assert (out.windows[late] < BLOCK).mean() > 0.2
    assert (out.windows[late] > 0).mean() > 0.2
    assert joint_pvalue(out.tokens) > LEVEL


@pytest.mark.parametrize("mode", ["off", "static"])
def test_without_a_budget_they_have_it_too(mode):
    assert joint_pvalue(sample(config(mode), FEW_RUNS).tokens) > LEVEL


def test_a_threshold_leaves_the_targets_joint_distribution():
    """The rule is simpler than any budget, and its windows vary in every batch."""
    out = sample(config("compact", threshold=0.5), FEW_RUNS)
    assert 0.05 < (out.windows[:, :, 0] == BLOCK).mean() < 0.95
    assert joint_pvalue(out.tokens) > LEVEL


def test_a_shape_leaves_the_targets_joint_distribution():
    """Three rows for the drafts of both requests: this step's survivals settle who gets them."""
    shaped = config("compact", shape=Shape(depth=BLOCK, rows=SLOTS + 3))
    out = sample(shaped, FEW_RUNS)
    assert (out.windows[:, :, 0].sum(axis=1) == 3).all()
    first_has_more = out.windows[:, 0, 2] > out.windows[:, 1, 2]
    assert 0.05 < first_has_more.mean() < 0.95, "windows follow confidences"
    assert joint_pvalue(out.tokens) > LEVEL


def test_compact_and_cap_accept_commit_the_same_tokens_when_sampling():
    compact, capped = (
        sample_once(config("compact"), RUNS),
        sample_once(config("cap-accept"), FEW_RUNS),
    )
    tokens, windows, accepted = (
        getattr(compact, name)[:FEW_RUNS] for name in ("tokens", "windows", "accepted")
    )
    assert (tokens == capped.tokens).all()
    assert (windows == capped.windows).all()
    assert (capped.accepted >= accepted).all()
    assert (capped.accepted > accepted).any()


def appendix_a(policy: str) -> float:
    """Share of token A where the paper's appendix A has p(A) = 0.7, q(A) = 0.5."""
    target = MarkovTargetWeights(jnp.log(jnp.asarray([[0.7, 0.3], [0.7, 0.3]])))
    certain, doubtful = np.log(0.9 / 0.1), -np.inf
    confidence = jnp.asarray([[np.log(0.8 / 0.2)] * 2, [certain, doubtful]])
    drafter = MarkovDrafterWeights(jnp.zeros((2, 2)), confidence)
    plain = no_costs(1, 2)
    speed = jnp.asarray([1.0, 1.0, 0.5, 0.45])
    known = plain.replace(verify=(1 / speed)[None], known=jnp.asarray(True))
    arm = StepConfig(
        target=MarkovTargetConfig(2),
        drafter=MarkovDrafterConfig(2, 2),
        mode="compact",
        policy=policy,
        filtered=False,
    )

    def first_token(seed):
        return loop.generate(
            Weights(target, drafter),
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
            make_requests(1, temperature=1.0, seed=seed, max_new_tokens=4, context=32),
            known,
            config=arm,
            max_tokens=4,
        ).tokens[0, 0]

    return float((in_parts(first_token, 200_000) == 0).mean())


def test_appendix_a_is_sampled_right_by_the_lagged_policy():
    assert abs(appendix_a("lagged") - 0.7) < 0.005


def test_appendix_a_is_biased_under_the_fresh_policy():
    """The argmax on current confidences verifies only when A was drafted: 0.85 instead of 0.7."""
    assert abs(appendix_a("fresh") - 0.85) < 0.005


def test_the_fresh_policy_fails_the_joint_distribution_test():
    assert joint_pvalue(sample(config("compact", "fresh"), FEW_RUNS).tokens) < LEVEL


def share_of_good_tokens(arm: StepConfig) -> float:
    """Share of token 0 in the answers of the second of two requests; half is right.

    Drafts and target agree, both a fair coin at every position. The first request holds the one
    free slot; the second is verified only after a step in which the third confidence of both was
    good, and that confidence looks at the second drafted token.
    """
    coin = jnp.zeros((2, 2))
    confidence = jnp.asarray([[3.0, 3.0], [3.0, 3.0], [3.0, -5.0]])
    plain = no_costs(SLOTS, BLOCK)
    verify = jnp.where(jnp.arange(plain.verify.shape[1]) <= SLOTS + 1, 1.0, 2.4)
    known = plain.replace(verify=verify[None], known=jnp.asarray(True))

    def batch(seed):
        return loop.generate(
            Weights(MarkovTargetWeights(coin), MarkovDrafterWeights(coin, confidence)),
            jnp.zeros((SLOTS, 1), jnp.int32),
            jnp.ones(SLOTS, jnp.int32),
            make_requests(SLOTS, temperature=1.0, seed=seed * SLOTS, max_new_tokens=24, context=64),
            known,
            config=arm,
            max_tokens=24,
        ).tokens[1]

    return float((in_parts(batch, 4000)[:, 6:18] == 0).mean())


def coin_arm() -> StepConfig:
    """Budgets follow the newest confidences alone, which look hardest at drafted tokens."""
    return StepConfig(
        target=MarkovTargetConfig(2),
        drafter=MarkovDrafterConfig(2, BLOCK),
        mode="compact",
        filtered=False,
        smoothing=1.0,
        hysteresis=0.0,
    )


def test_noise_keyed_by_the_requests_steps_is_fair():
    assert abs(share_of_good_tokens(coin_arm()) - 0.5) < 0.01


class AnotherDrafter(MarkovDrafterConfig):
    """Equal to no other config: what is traced with it is used for nothing else."""


def test_noise_keyed_by_absolute_position_is_not(monkeypatch):
    """A trimmed position drafted again with the noise it had: the budget has seen the token."""
    offset = []
    plain_step = loop.decode_step

    def position_keyed_step(weights, state, tables, *, config):
        moved, outcome = plain_step(
            weights, state.replace(steps=state.cache.length), tables, config=config
        )
        return moved.replace(steps=state.steps + (outcome.count > 0)), outcome

    def keys_without_step(seed, length):
        offset.append(length)
        return jax.random.wrap_key_data(seed)

    def fold_position(keys, role, position):
        index = jnp.asarray(role + 4 * (position + offset[-1]), jnp.uint32)
        return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(index, keys.shape))

    monkeypatch.setattr(loop, "decode_step", position_keyed_step)
    monkeypatch.setattr(noise, "step_keys", keys_without_step)
    monkeypatch.setattr(noise, "_fold", fold_position)
    arm = dataclasses.replace(coin_arm(), drafter=AnotherDrafter(2, BLOCK))
    assert abs(share_of_good_tokens(arm) - 0.5) > 0.03
