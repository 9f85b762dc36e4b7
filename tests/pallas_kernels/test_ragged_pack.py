"""Packing: every implementation against rows packed by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_pack import pallas_triton, ragged_pack, reference
from pallas_kernels.ragged_pack.shapes import SHAPES

REQUESTS, WIDTH, SIZE = 11, 6, 70
INTERPRETED = functools.partial(
    pallas_triton.ragged_pack, tuning=pallas_triton.Tuning(4, 1), interpret=True
)


@pytest.fixture(
    scope="module",
    params=[
        "xla",
        "xla scan",
        "triton, interpreted",
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)
def run(request):
    call = {
        "xla": functools.partial(ragged_pack, implementation="xla"),
        "xla scan": functools.partial(reference.ragged_pack, search="scan"),
        "triton, interpreted": INTERPRETED,
        "triton": functools.partial(ragged_pack, implementation="triton"),
    }[request.param]
    return jax.jit(call, static_argnums=3)


def batch(count):
    random = np.random.default_rng(5)
    tokens = random.integers(1, 1 << 17, (len(count), WIDTH), np.int32)
    start = random.integers(1, 1 << 20, len(count), np.int32)
    return jnp.asarray(tokens), jnp.asarray(start), jnp.asarray(count, jnp.int32)


def by_hand(tokens, start, count, size):
    packed = []
    row = np.full(tokens.shape, size)
    for s, own in enumerate(np.asarray(count)):
        for w in range(own):
            row[s, w] = len(packed)
            packed.append((tokens[s, w], s, start[s] + w))
    packed += [(0, len(tokens), 0)] * (size - len(packed))
    return *np.asarray(packed).T, row


COUNTS = {
    "mixed": [3, 0, 6, 1, 0, 0, 2, 6, 5, 0, 1],
    "none": [0] * REQUESTS,
    "all": [WIDTH] * REQUESTS,
    "the last alone": [0] * (REQUESTS - 1) + [4],
    "the first alone": [1] + [0] * (REQUESTS - 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_requests_follow_one_another_and_free_rows_are_blank(run, name):
    case = batch(COUNTS[name])
    for got, want in zip(run(*case, SIZE), by_hand(*case, SIZE), strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, want)


def test_a_batch_may_fill_every_row(run):
    case = batch(COUNTS["mixed"])
    size = sum(COUNTS["mixed"])
    for got, want in zip(run(*case, size), by_hand(*case, size), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name):
    shape = SHAPES[name]
    tokens = jnp.zeros((shape.requests, shape.width), jnp.int32)
    assert pallas_triton.unsupported(tokens, tokens[:, 0], tokens[:, 0]) is None
    text = lowered_for_hopper(
        lambda *arrays: pallas_triton.ragged_pack(*arrays, shape.size),
        tokens,
        tokens[:, 0],
        tokens[:, 0],
    )
    assert text.count("xla.gpu.triton") == 1


def test_the_kernel_says_what_it_does_not_support():
    tokens, start, count = batch([1])
    says = pallas_triton.unsupported(tokens, start.astype(jnp.int16), count)
    assert says == "the dtype of start is int16, wanted int32"
    many = jnp.zeros((8193, 1), jnp.int32)
    assert "8193 requests, wanted 1 to 8192" in (
        pallas_triton.unsupported(many, many[:, 0], many[:, 0]) or ""
    )


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises_and_the_default_falls_back():
    case = batch(COUNTS["mixed"])
    with pytest.raises(NotImplementedError, match="ragged_pack cannot run"):
        ragged_pack(*case, SIZE, implementation="triton")
    for got, want in zip(ragged_pack(*case, SIZE), by_hand(*case, SIZE), strict=True):
        np.testing.assert_array_equal(got, want)


def test_shapes_that_disagree_are_refused():
    tokens, start, count = batch(COUNTS["mixed"])
    with pytest.raises(ValueError, match=r"wanted \[S, W\], \[S\] and \[S\]"):
        ragged_pack(tokens, start[1:], count, SIZE)
