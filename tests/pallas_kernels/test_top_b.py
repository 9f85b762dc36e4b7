"""Allocation: every implementation against the stable sort, to the last tie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.top_b import pallas_triton, reference, top_b
from pallas_kernels.top_b.shapes import SHAPES

SLOTS, DEPTH = 37, 7


@pytest.fixture(
    scope="module",
    params=["xla ranks", "triton, interpreted", pytest.param("triton", marks=pytest.mark.gpu)],
)
def run(request):
    return jax.jit(
        {
            "xla ranks": reference.by_ranks,
            "triton, interpreted": functools.partial(pallas_triton.top_b, interpret=True),
            "triton": functools.partial(top_b, implementation="triton"),
        }[request.param]
    )


def batch(values, seed):
    """Survivals that are products of ``values``, and valid prefixes."""
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.choice(values, (SLOTS, DEPTH)), axis=1, dtype=np.float32)
    valid = np.arange(DEPTH) < random.integers(0, DEPTH + 1, (SLOTS, 1))
    return jnp.asarray(survival), jnp.asarray(valid)


def by_hand(survival, valid, budget):
    survival, valid = np.asarray(survival), np.asarray(valid)
    slots = sorted((-survival[s, j], j, s) for s, j in zip(*np.nonzero(valid), strict=True))
    chosen = [request for _, _, request in slots[: max(budget, 0)]]
    return np.bincount(chosen, minlength=SLOTS)


@pytest.mark.parametrize("budget", [-1, 0, 1, 36, 80, 10_000])
@pytest.mark.parametrize("values", [[0.0, 0.5, 1.0], [1.0], np.linspace(0.01, 0.99, 97)])
def test_windows_are_those_of_the_sorted_slots(run, values, budget):
    survival, valid = batch(values, seed=budget + 1)
    got = run(survival, valid, jnp.int32(budget))
    np.testing.assert_array_equal(got, by_hand(survival, valid, budget))
    np.testing.assert_array_equal(got, reference.top_b(survival, valid, jnp.int32(budget)))


def test_invalid_slots_are_never_chosen(run):
    survival, valid = batch([1.0], seed=0)
    assert not run(survival, valid & False, jnp.int32(50)).any()


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name):
    shape = SHAPES[name]
    survival = jnp.zeros((shape.requests, shape.depth))
    assert pallas_triton.unsupported(survival) is None
    text = lowered_for_hopper(pallas_triton.top_b, survival, survival > 0, jnp.int32(0))
    assert text.count("xla.gpu.triton") == 1


def test_the_kernel_says_what_it_does_not_support():
    wide = jnp.zeros((8192, 7))
    assert "57344 slots, wanted 1 to 32768" in (pallas_triton.unsupported(wide) or "")
    narrow = jnp.zeros((4, 7), jnp.bfloat16)
    assert "dtype of survival is bfloat16" in (pallas_triton.unsupported(narrow) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises_and_the_default_falls_back(monkeypatch):
    survival, valid = batch([0.5, 1.0], seed=3)
    with pytest.raises(NotImplementedError, match="top_b cannot run"):
        top_b(survival, valid, jnp.int32(9), implementation="triton")
    monkeypatch.setattr("pallas_kernels.top_b.api.AUTOMATIC", "triton")
    got = top_b(survival, valid, jnp.int32(9))
    np.testing.assert_array_equal(got, reference.top_b(survival, valid, jnp.int32(9)))


def test_shapes_that_disagree_are_refused():
    survival, valid = batch([0.5], seed=0)
    with pytest.raises(ValueError, match=r"wanted \[S, G\] twice and a scalar"):
        top_b(survival, valid[:, 1:], jnp.int32(1))
