"""Bounds from inside a run that cuts blocks, against what cap-accept saw of the same blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import init_state, make_requests
from dspark_jax.decode.step import Weights, decode_step
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing.markov import (
    MarkovDrafterConfig,
    MarkovDrafterWeights,
    MarkovTargetConfig,
    MarkovTargetWeights,
)

VOCAB, BLOCK, TOKENS = 6, 4, 20
GROUP = 400
KINDS = ("greedy", "sampled", "filtered")
SLOTS = GROUP * len(KINDS)


def weights():
    random = np.random.default_rng(0)
    target = 1.5 * random.normal(size=(VOCAB, VOCAB))
    drafter = target + 0.7 * random.normal(size=(VOCAB, VOCAB))
    confidence = random.normal(size=(BLOCK, VOCAB)) + 0.5
    as_array = lambda values: jnp.asarray(values, jnp.float32)  # noqa: E731
    return Weights(
        MarkovTargetWeights(as_array(target)),
        MarkovDrafterWeights(as_array(drafter), as_array(confidence)),
    )


def run(mode):
    """Every request to its end; a first life of five steps is taken away from all of them."""
    config = StepConfig(
        target=MarkovTargetConfig(VOCAB),
        drafter=MarkovDrafterConfig(VOCAB, BLOCK),
        mode=mode,
        threshold=0.5,
        bound_blocks=True,
    )
    index = jnp.arange(SLOTS)
    requests = make_requests(
        SLOTS,
        temperature=jnp.where(index < GROUP, 0.0, 1.0),
        top_k=jnp.where(index < 2 * GROUP, 0, 3),
        max_new_tokens=TOKENS,
        context=64,
    )

    @jax.jit
    def begin(state, life):
        taken_in = requests.replace(seed=requests.seed + life)
        state = loop.admit(state, index, index % VOCAB, taken_in)
        length = jnp.full_like(state.cache.length, 3 * life)
        return state.replace(cache=state.cache.replace(length=length))

    @jax.jit
    def step(state):
        state, outcome = decode_step(weights(), state, no_costs(SLOTS, BLOCK), config=config)
        return state, (outcome.count, outcome.window, outcome.accepted, outcome.bounds)

    state = init_state(config, slots=SLOTS, capacity=64, max_tokens=TOKENS, dtype=jnp.float32)
    found = []
    for life, count in enumerate((5, TOKENS)):
        state = begin(state, life)
        for _ in range(count):
            state, taken = step(state)
            found.append(jax.device_get(taken))
    return jax.tree.map(lambda *parts: np.stack(parts), *found)


@pytest.fixture(scope="module")
def seen():
    """Steps in cap-accept: by step and slot, tokens, windows, drafts accepted, and bounds."""
    return run("cap-accept")


def by_kind(values):
    """Sums over steps ``[kinds, GROUP]``."""
    return values.sum(axis=0).reshape(len(KINDS), GROUP)


def truth(seen):
    """What full blocks would have committed: that, and what the windows cut."""
    count, window, accepted, _ = seen
    return by_kind(count + np.where(count > 0, np.maximum(accepted - window, 0), 0))


def test_every_block_is_counted_once(seen):
    count, _, _, bounds = seen
    assert (by_kind(bounds.blocks) == by_kind(count > 0)).all(), "those taken away too"
    assert (bounds.low <= bounds.high).all()


def test_the_bounds_hold_the_truth(seen):
    bounds = seen[3]
    low, high, full = by_kind(bounds.low), by_kind(bounds.high), truth(seen)
    committed = by_kind(seen[0])
    for kind in range(len(KINDS)):
        for above in (full[kind] - low[kind], high[kind] - full[kind]):
            noise = above.std() / np.sqrt(GROUP)
            assert above.mean() >= -4 * noise - 1e-5, KINDS[kind]
        cut = (full[kind] - committed[kind]).sum()
        found = (low[kind] - committed[kind]).sum()
        assert found > 0.4 * cut > 40, f"much of what {KINDS[kind]} windows cut is known"


def test_nothing_is_left_open_for_greedy_requests_that_are_not_taken_away(seen):
    # the second life; the truth of each block is its acceptance
    second = jax.tree.map(lambda part: part[5:, :GROUP], seen)
    count, window, accepted, bounds = second
    full = (count + np.where(count > 0, np.maximum(accepted - window, 0), 0)).sum(axis=0)
    first = seen[3].blocks[:5, :GROUP].sum(axis=0)
    whole = first == (seen[0][:5, :GROUP] > 0).sum(axis=0)  # no block of the first life came over
    assert whole.sum() > 10
    np.testing.assert_allclose(bounds.low.sum(axis=0)[whole], full[whole])
    np.testing.assert_allclose(bounds.high.sum(axis=0)[whole], full[whole])


def test_compact_bounds_what_cap_accept_bounds(seen):
    found = run("compact")
    assert (found[2] <= found[1]).all(), "nothing behind the windows is verified"
    for mine, theirs in zip(jax.tree.leaves(found[3]), jax.tree.leaves(seen[3]), strict=True):
        np.testing.assert_allclose(by_kind(mine), by_kind(theirs), rtol=1e-4)


def test_only_modes_that_cut_blocks_have_bounds():
    with pytest.raises(ValueError, match="bound_blocks is on in mode 'static'; wanted \"compact\""):
        StepConfig(
            target=MarkovTargetConfig(VOCAB),
            drafter=MarkovDrafterConfig(VOCAB, BLOCK),
            mode="static",
            bound_blocks=True,
        )
