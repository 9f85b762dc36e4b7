"""Budgets and allocations against a plain-Python account of the same rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.schedule.budget import (
    Load,
    _counted_gains,
    _sorted_gains,
    allocate,
    best_budget,
    causal_budget,
    expected_throughput,
    undrafted_throughput,
)
from dspark_jax.schedule.cost import CostTables, no_costs

SLOTS, BLOCK = 3, 4
best = jax.jit(best_budget)
causal = jax.jit(causal_budget)
of_depths = jax.jit(functools.partial(best_budget, depths=(1, 3, BLOCK)))
throughput = jax.jit(expected_throughput)
allotted = jax.jit(allocate)


def tables(verify, draft=None, contexts=(0.0,), block_size=BLOCK):
    """Cost tables from ``[C][tokens]`` seconds; drafting is free unless given."""
    verify = np.atleast_2d(np.asarray(verify, np.float32))
    if draft is None:
        draft = np.zeros((len(verify), SLOTS + 1))
    return CostTables(
        verify=jnp.asarray(verify),
        draft=jnp.atleast_2d(jnp.asarray(draft, jnp.float32)),
        walk=jnp.ones(block_size),
        contexts=jnp.asarray(contexts, jnp.float32),
        known=jnp.asarray(True),
        temperatures=jnp.ones((1, block_size)),
        temperature_keys=jnp.zeros(1),
    )


def load(sampling, base=None, requests=None, rows=0):
    base = sampling if base is None else base
    requests = sampling if requests is None else requests
    return Load(*(jnp.asarray(x, jnp.int32) for x in (sampling, base, requests, rows)))


@st.composite
def batches(draw):
    """Survivals (with many exact ties), valid prefixes, live requests, a staircase of costs."""
    confidence = draw(
        st.lists(
            st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
            min_size=SLOTS * BLOCK,
            max_size=SLOTS * BLOCK,
        )
    )
    survival = np.cumprod(np.array(confidence, np.float32).reshape(SLOTS, BLOCK), axis=1)
    length = draw(st.lists(st.integers(0, BLOCK), min_size=SLOTS, max_size=SLOTS))
    valid = np.arange(BLOCK) < np.array(length)[:, None]
    steps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.125, 1.0, 2.0]), min_size=15, max_size=15))
    verify = 1.0 + np.concatenate([[0.0], np.cumsum(steps)])
    draft = draw(st.sampled_from([0.0, 0.5, 4.0]))
    sampling = draw(st.integers(1, SLOTS))
    return survival, valid, verify, draft, sampling


def oracle_throughput(survival, valid, verify, draft, sampling):
    chosen = sorted((float(a) for a in survival[valid]), reverse=True)
    return [
        (sampling + sum(chosen[:b])) / (draft + float(verify[sampling + b]))
        for b in range(len(chosen) + 1)
    ]


def oracle_windows(survival, valid, budget):
    slots = [(-survival[r, j], j, r) for r in range(SLOTS) for j in range(BLOCK) if valid[r, j]]
    windows = [0] * SLOTS
    for _, _, request in sorted(slots)[:budget]:
        windows[request] += 1
    return windows


@settings(deadline=None, max_examples=150)
@given(batches())
def test_throughput_and_both_policies_agree_with_a_brute_force_search(batch):
    survival, valid, verify, draft, sampling = batch
    cost = tables(verify, np.full((1, SLOTS + 1), draft))
    expected = oracle_throughput(*batch)
    theta = np.asarray(throughput(survival, valid, load(sampling), cost))
    np.testing.assert_allclose(theta[: len(expected)], expected, rtol=1e-6)
    assert (theta[len(expected) :] == -np.inf).all()

    # fp32 values throughout, so equal throughputs are equal here as well.
    exact = theta[: len(expected)].tolist()
    found = best(survival, valid, load(sampling), cost)
    assert int(found.budget) == exact.index(max(exact))
    stop = 0
    while stop + 1 < len(exact) and exact[stop + 1] > exact[stop]:
        stop += 1
    assert int(causal(survival, valid, load(sampling), cost).budget) == stop


@settings(deadline=None, max_examples=150)
@given(batches(), st.integers(0, SLOTS * BLOCK + 3))
def test_the_highest_survivals_are_allotted_and_ties_go_by_position_then_request(batch, budget):
    survival, valid, *_ = batch
    windows = np.asarray(allotted(survival, valid, budget))
    assert windows.tolist() == oracle_windows(survival, valid, budget)
    assert windows.sum() == min(budget, valid.sum())
    assert (windows <= valid.sum(axis=1)).all()


def test_a_staircase_stops_the_early_stop_but_not_the_global_search():
    cost = tables([1.0, 1.0, 2.1, 2.1, 2.1, 2.1], block_size=4)
    survival = np.cumprod(np.full((1, 4), 0.95, np.float32), axis=1)
    valid = np.ones((1, 4), bool)
    theta = np.asarray(throughput(survival, valid, load(1), cost))
    np.testing.assert_allclose(theta[[0, 1, 4]], [1.0, 0.929, 2.1545], atol=5e-4)
    assert int(best(survival, valid, load(1), cost).budget) == 4
    assert int(causal(survival, valid, load(1), cost).budget) == 0


@pytest.mark.parametrize(("second", "greedy_choice"), [(0.9, 2), (0.0, 0)])
def test_the_early_stop_is_blind_to_the_token_that_biases_a_global_search(second, greedy_choice):
    cost = tables(1 / np.array([1.0, 1.0, 0.5, 0.45]), block_size=2)
    survival = np.array([[0.8, 0.8 * second]], np.float32)
    valid = np.ones((1, 2), bool)
    assert int(causal(survival, valid, load(1), cost).budget) == 0
    assert int(best(survival, valid, load(1), cost).budget) == greedy_choice


@pytest.mark.parametrize("policy", [best, causal])
def test_without_a_table_everything_valid_is_verified(policy):
    valid = np.arange(BLOCK) < np.array([[4], [2], [0]])
    survival = np.full((SLOTS, BLOCK), 1e-9, np.float32)
    found = policy(survival, valid, load(3), no_costs(SLOTS, BLOCK))
    assert int(found.budget) == 6
    assert float(found.gain) > 1


@pytest.mark.parametrize("policy", [best, causal])
def test_flat_costs_verify_everything(policy):
    valid = np.ones((SLOTS, BLOCK), bool)
    survival = np.cumprod(np.full((SLOTS, BLOCK), 0.3, np.float32), axis=1)
    found = policy(survival, valid, load(3), tables(np.ones(16)))
    assert int(found.budget) == SLOTS * BLOCK
    assert float(found.gain) > 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("policy", [best, causal])
def test_nothing_valid_means_no_budget_and_no_drafting(policy, known):
    cost = tables(np.ones(16)).replace(known=jnp.asarray(known))
    found = policy(np.ones((SLOTS, BLOCK)), np.zeros((SLOTS, BLOCK), bool), load(3), cost)
    assert int(found.budget) == 0
    assert float(found.gain) <= 1
    assert np.isfinite(float(found.throughput))


def test_a_batch_with_no_live_request_gets_a_finite_answer():
    found = best(
        np.ones((SLOTS, BLOCK)), np.zeros((SLOTS, BLOCK), bool), load(0), tables(np.ones(16))
    )
    assert int(found.budget) == 0
    assert float(found.throughput) == 0


def test_drafting_dearer_than_it_gains_has_a_gain_below_one():
    survival = np.full((SLOTS, BLOCK), 0.9, np.float32)
    valid = np.ones((SLOTS, BLOCK), bool)
    verify = np.linspace(1.0, 1.5, 16)
    cheap = tables(verify, np.full((1, SLOTS + 1), 0.1))
    dear = tables(verify, np.full((1, SLOTS + 1), 5 * verify.max()))
    assert float(best(survival, valid, load(3), cheap).gain) > 1
    found = best(survival, valid, load(3), dear)
    assert float(found.gain) <= 1
    assert float(found.throughput) < float(undrafted_throughput(load(3), dear))


def test_a_shallow_walk_is_taken_where_it_saves_more_than_the_deep_positions_bring():
    survival = np.cumprod(np.full((SLOTS, BLOCK), 0.5, np.float32), axis=1)
    valid = np.ones((SLOTS, BLOCK), bool)
    cost = tables(np.ones(16), np.ones((1, SLOTS + 1)))
    best_of = jax.jit(functools.partial(best_budget, depths=(1, 2, BLOCK)))
    level = best_of(survival, valid, load(3), cost)
    assert (int(level.depth), int(level.budget)) == (BLOCK, SLOTS * BLOCK)
    steep = cost.replace(walk=jnp.asarray([0.1, 0.2, 0.9, 1.0]))
    found = best_of(survival, valid, load(3), steep)
    # (3 + 3 * 0.75) / (1 + 0.2), against 4.5 / 1.1 and (3 + 3 * 0.9375) / 2
    assert (int(found.depth), int(found.budget)) == (2, SLOTS * 2)
    assert float(found.throughput) == pytest.approx(5.25 / 1.2)
    assert float(found.gain) == pytest.approx(5.25 / 1.2 / 3)


@settings(deadline=None, max_examples=60)
@given(batches(), st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=BLOCK, max_size=BLOCK))
def test_depth_and_budget_agree_with_a_search_of_each_depth_alone(batch, shares):
    survival, valid, verify, draft, sampling = batch
    cost = tables(verify, np.full((1, SLOTS + 1), draft)).replace(walk=jnp.asarray(shares))
    found = of_depths(survival, valid, load(sampling), cost)
    alone = []
    for depth in (1, 3, BLOCK):
        shallow = valid & (np.arange(BLOCK) < depth)
        price = np.float32(draft) * np.float32(shares[depth - 1])
        alone.append(max(oracle_throughput(survival, shallow, verify, price, sampling)))
    assert float(found.throughput) == pytest.approx(max(alone), rel=1e-5)


def test_only_sampling_requests_count_as_gain_but_every_base_token_costs():
    survival = np.zeros((SLOTS, BLOCK), np.float32)
    valid = np.ones((SLOTS, BLOCK), bool)
    cost = tables(np.arange(1.0, 17.0))
    theta = throughput(survival, valid, load(1, base=3), cost)
    np.testing.assert_allclose(theta[0], 1 / 4)
    np.testing.assert_allclose(undrafted_throughput(load(1, base=3), cost), 1 / 4)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 1.0), (50, 1.0), (100, 1.0), (250, 2.5), (300, 3.0), (9999, 3.0)]
)
def test_costs_follow_the_live_context_and_stop_at_the_grid(rows, seconds):
    cost = tables(
        np.array([[1.0], [2.0], [3.0]]) * np.ones((1, 16)),
        np.zeros((3, SLOTS + 1)),
        contexts=(100.0, 200.0, 300.0),
    )
    found = undrafted_throughput(load(2, rows=rows), cost)
    np.testing.assert_allclose(found, 2 / seconds, rtol=1e-6)


def test_a_longer_context_can_change_the_budget():
    survival = np.cumprod(np.full((SLOTS, BLOCK), 0.6, np.float32), axis=1)
    valid = np.ones((SLOTS, BLOCK), bool)
    flat, steep = np.ones(16), np.arange(1.0, 17.0) ** 2
    cost = tables([flat, steep], np.zeros((2, SLOTS + 1)), contexts=(0.0, 1000.0))
    assert int(best(survival, valid, load(3, rows=0), cost).budget) == 12
    assert int(best(survival, valid, load(3, rows=1000), cost).budget) == 0


def test_a_lagged_budget_ignores_this_steps_survivals_and_a_slots_rank_its_own_token():
    valid = np.ones((SLOTS, BLOCK), bool)
    lagged = np.cumprod(np.full((SLOTS, BLOCK), 0.7, np.float32), axis=1)
    cost = tables(np.linspace(1, 3, 16))
    budget = best(lagged, valid, load(3), cost).budget
    current = np.cumprod(np.full((SLOTS, BLOCK), 0.8, np.float32), axis=1)
    window = np.asarray(allotted(current, valid, budget))
    # x_j of a request enters survivals from j + 1 on: whether slot j is verified cannot move.
    for position in range(BLOCK - 1):
        other = current.copy()
        other[1, position + 1 :] *= 0.01
        changed = np.asarray(allotted(other, valid, budget))
        assert (changed[1] > position) == (window[1] > position)


def test_a_threshold_style_zero_survival_window_is_empty():
    survival = np.zeros((SLOTS, BLOCK), np.float32)
    valid = np.ones((SLOTS, BLOCK), bool)
    found = best(survival, valid, load(3), tables(np.linspace(1, 2, 16)))
    assert int(found.budget) == 0
    assert np.asarray(allotted(survival, valid, found.budget)).tolist() == [0, 0, 0]


def test_the_budget_is_the_same_every_time():
    random = np.random.default_rng(0)
    survival = np.cumprod(random.uniform(size=(64, 7)).astype(np.float32), axis=1)
    valid = np.ones((64, 7), bool)
    cost = no_costs(64, 7).replace(
        known=jnp.asarray(True), verify=jnp.linspace(1, 4, 64 * 8 + 1)[None]
    )
    step = jax.jit(functools.partial(best_budget))
    seen = {int(step(survival, valid, load(64), cost).budget) for _ in range(5)}
    assert len(seen) == 1
    assert 0 < seen.pop() < 64 * 7


def test_counting_and_sorting_find_the_same_gains():
    random = np.random.default_rng(3)
    survival = np.cumprod(random.choice([0.5, 0.75, 1.0], (5, 4)), axis=1).astype(np.float32)
    key = jnp.asarray(np.where(random.uniform(size=(5, 4)) < 0.8, survival, -1.0)).reshape(-1)
    position = jnp.tile(jnp.arange(1, 5), 5)
    depths = jnp.asarray([[1], [3], [4]])
    found = [
        {
            (depth, int(budget)): float(sum_)
            for depth, row in enumerate(zip(*gains(key, position, depths), strict=True))
            for sum_, budget, real in zip(*map(np.asarray, row), strict=True)
            if real
        }
        for gains in map(jax.jit, (_counted_gains, _sorted_gains))
    ]
    assert found[0] == pytest.approx(found[1])
    assert len(found[0]) > 20
