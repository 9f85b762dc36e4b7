"""The fused walk drafts what XLA's own operations draft, head by head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import fused_walk, noise
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.draft import draft
from dspark_jax.decode.state import init_state, make_requests
from pallas_kernels.markov_sample import pallas_triton
from pallas_kernels.markov_sample.pallas_triton import Tuning

SLOTS = 3


@pytest.fixture
def through_the_kernel(monkeypatch):
    """The kernel, interpreted, wherever it supports the operands."""
    monkeypatch.setattr(
        fused_walk, "kernel_runs", lambda position: pallas_triton.unsupported(position) is None
    )
    interpreted = functools.partial(
        pallas_triton.markov_sample, tuning=Tuning(64, 16), interpret=True
    )
    monkeypatch.setattr(fused_walk, "markov_sample", interpreted)


def bf16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)


def case(pair, sampled):
    """A drafter in bf16, and a state with an anchor a slot."""
    config = StepConfig(pair.target, pair.drafter, "static", sampled=sampled, filtered=False)
    weights = pair.weights.replace(
        target=bf16(pair.weights.target), drafter=bf16(pair.weights.drafter)
    )
    state = init_state(config, slots=SLOTS, capacity=32, max_tokens=8, dtype=jnp.bfloat16)
    temperature = jnp.asarray([0.7, 0.0, 1.3]) if sampled else 0.0
    requests = make_requests(SLOTS, temperature=temperature, max_new_tokens=8, context=32)
    return config, weights, state.replace(requests=requests, anchor=jnp.arange(SLOTS) + 5)


@pytest.mark.parametrize("sampled", [True, False])
def test_the_kernel_drafts_what_the_plain_walk_drafts(pair, through_the_kernel, sampled):
    config, weights, state = case(pair, sampled)
    keys = noise.step_keys(state.requests.seed, state.steps) if sampled else None

    def run(cap):
        return jax.jit(functools.partial(draft, config=config, cap=cap))(weights, state, keys)

    found = run(5)
    fused_walk.kernel_runs = lambda position: False  # undone with the fixture's change
    wanted = run(5)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.confidence, wanted.confidence, rtol=1e-3, atol=1e-3)
    if not sampled:
        assert found.scores is None
        assert found.logprob is None
        return
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.logprob, wanted.logprob, rtol=1e-4, atol=1e-4)
